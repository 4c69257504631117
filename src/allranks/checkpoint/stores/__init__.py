"""Where checkpoints are kept: memory, peers, disk, object stores. Torch-free."""
