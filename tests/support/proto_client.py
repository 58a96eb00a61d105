"""A client of WorkerService that knows nothing but the .proto file: reads `METHOD REQUEST` lines, prints answers as JSON.

python proto_client.py PROTO FOLDER ADDRESS [TLS_FOLDER]       # modules are made in FOLDER; TOKEN in the environment is shown
"""

import json
import os
import sys
from pathlib import Path

import grpc
from google.protobuf import json_format
from grpc_tools import protoc


def main(proto: str, folder: str, address: str, tls: str = "") -> None:
    path = Path(proto)
    if protoc.main(["", f"-I{path.parent}", f"--python_out={folder}", f"--grpc_python_out={folder}", path.name]):
        raise SystemExit(f"{proto} is not understood")
    sys.path.insert(0, folder)
    import worker_pb2
    import worker_pb2_grpc

    channel = grpc.insecure_channel(address)
    if tls:
        ca, key, cert = (Path(tls, name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
        options = [("grpc.ssl_target_name_override", "scheduler-grpc")]
        channel = grpc.secure_channel(address, grpc.ssl_channel_credentials(ca, key, cert), options)
    stub = worker_pb2_grpc.WorkerServiceStub(channel)
    metadata = [("authorization", f"Bearer {os.environ['TOKEN']}")] if "TOKEN" in os.environ else None
    for line in sys.stdin:
        method, _, given = line.partition(" ")
        request = json_format.ParseDict(json.loads(given), getattr(worker_pb2, f"{method}Request")())
        try:
            answer = json_format.MessageToDict(getattr(stub, method)(request, timeout=10, metadata=metadata))
        except grpc.RpcError as error:
            answer = {"code": error.code().name, "details": error.details()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
