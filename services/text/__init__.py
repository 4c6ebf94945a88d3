"""Text and tokens: the model's tokenizer and chat template, and text that comes out token by token."""
