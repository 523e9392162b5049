"""What the process group, the device and the host can do."""
