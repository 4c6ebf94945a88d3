"""Runners: disposable processes that borrow blocks, run the model with paged kernels, and hand blocks back."""
