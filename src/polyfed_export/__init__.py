"""A client's model in other forms: as factors of low rank, as ONNX, as an adapter of peft."""
