"""Steps of optimizers on shards, on the device and on the host."""
