"""The Open Inference Protocol (KServe V2, Triton) over gRPC and HTTP: two codecs around one `infer`."""
