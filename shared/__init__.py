"""What all processes agree on. Nothing here knows gRPC, protobuf or a particular process."""
