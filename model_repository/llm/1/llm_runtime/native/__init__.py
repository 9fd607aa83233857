"""Paged attention for ONNX Runtime on a CPU: a custom operator in C (`paged_attention.c`), compiled on first use (`build`)."""
