"""The gRPC door of a Django node: the leader and the sub-leaders call it, and it calls other nodes.

    listener    TLS with rotated certificates, connections that are counted, each relayed to the gRPC server's private socket
    service     WorkerService: who calls, is it obeyed, what the node does
    calls       calls to other nodes
    worker_pb2  the messages, made from proto/tasuki/v1/worker.proto by scripts/make_proto.py

A call goes: listener (certificate) → gRPC server → `service` (caller, epoch) → the node. `grpc` is imported here and nowhere
else, and this package only after everything was forked: its threads do not survive a fork. `tasuki.django.node` opens the door.
"""
