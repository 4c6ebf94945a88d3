"""The ops for NVIDIA GPUs, in Triton. To import a module needs triton; to compile for a GPU needs no GPU."""
