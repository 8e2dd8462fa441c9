"""The edge: where gRPC, protobuf and HTTP end."""

import os

# gRPC's core writes its own lines to stderr, also for what we foresee and say better (a port in use). It reads this
# when it is first imported, which is after this line.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
