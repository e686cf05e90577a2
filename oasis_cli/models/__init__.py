"""Opening checkpoints (safetensors folders, GGUF files, hub ids), and finding what is to be quantized in them."""
