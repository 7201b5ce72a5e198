"""What forward passes compute in."""
