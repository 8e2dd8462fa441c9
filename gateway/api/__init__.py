"""The edge: where gRPC, protobuf and HTTP end."""
