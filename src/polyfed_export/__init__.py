"""A client's model as a file: its tensors, factors of low rank, ONNX, an adapter of peft."""
