"""Stock checkpoints: networks with constant keys as decoders that plain transformers loads."""
