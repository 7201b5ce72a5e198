"""Multi-token prediction (MTP): layers after the model's last layer that predict tokens after the next one."""
