"""Networks and whole one-pass restorations as ONNX graphs, for programs without PyTorch and for the browser."""
