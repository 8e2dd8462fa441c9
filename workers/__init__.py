"""The worker process: owns one device and the loaded models; the only process that imports torch."""
