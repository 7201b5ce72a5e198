"""Multi-token prediction (MTP): layers after the model's last layer that predict tokens further ahead."""
