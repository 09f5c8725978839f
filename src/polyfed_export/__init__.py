"""A client's model in the form of another library: ONNX, and adapters of peft."""
