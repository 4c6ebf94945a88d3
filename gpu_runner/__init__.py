"""Runners: disposable processes that borrow blocks, run the model with paged kernels, hand blocks back."""
