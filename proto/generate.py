"""Generate the protocol's Python code from ``ringtune/v1/*.proto``, or check that it is up to date.

Run ``python proto/generate.py`` after a change of a ``.proto`` file and commit what it writes; CI runs
``python proto/generate.py --check``. Needs ``grpcio-tools``; nothing else in the project does.

``protoc`` writes no types for services, so the stub of each ``*_pb2_grpc.py`` is written here from the
descriptors: servicers and clients are then checked by mypy like any other code.
"""

from __future__ import annotations

import importlib.resources
import sys
import tempfile
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet, MethodDescriptorProto, ServiceDescriptorProto
from grpc_tools import protoc

SOURCE_ROOT = Path(__file__).resolve().parent
PROTOS = ("ringtune/v1/control.proto", "ringtune/v1/ring.proto", "ringtune/v1/trust.proto", "ringtune/v1/weights.proto")
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")
_HEADER = '"""Types of the gRPC services of {proto}; written by proto/generate.py, do not edit."""\n'


def generate(target: Path) -> None:
    """Write all generated modules below ``target``.

    Raises:
        RuntimeError: protoc refused a file; its own message went to stderr.
    """
    descriptors = target / "descriptors.bin"
    arguments = [
        "protoc",
        f"-I{SOURCE_ROOT}",
        f"-I{importlib.resources.files('grpc_tools') / '_proto'}",
        f"--python_out={target}",
        f"--pyi_out={target}",
        f"--grpc_python_out={target}",
        f"--descriptor_set_out={descriptors}",
        *PROTOS,
    ]
    code = protoc.main(arguments)
    if code != 0:
        raise RuntimeError(f"protoc failed with exit code {code}; see its message above")
    for file in FileDescriptorSet.FromString(descriptors.read_bytes()).file:
        stub = _HEADER.format(proto=file.name) + _service_types(file.name, list(file.service))
        (target / file.name.replace(".proto", "_pb2_grpc.pyi")).write_text(stub)
    descriptors.unlink()


def outdated() -> tuple[str, ...]:
    """Generated files that differ from what the ``.proto`` files give now, or are missing."""
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        names = [proto.replace(".proto", suffix) for proto in PROTOS for suffix in SUFFIXES]
        return tuple(name for name in names if not _equal(Path(folder) / name, SOURCE_ROOT / name))


def _equal(new: Path, old: Path) -> bool:
    return old.exists() and new.read_bytes() == old.read_bytes()


def _service_types(proto: str, services: list[ServiceDescriptorProto]) -> str:
    module = proto.rsplit("/", 1)[-1].replace(".proto", "_pb2")
    package = proto.rsplit("/", 1)[0].replace("/", ".")
    lines = ["", "from collections.abc import Iterator", "", "import grpc", f"from {package} import {module}", ""]
    for service in services:
        lines += ["", f"class {service.name}Stub:", "    def __init__(self, channel: grpc.Channel) -> None: ..."]
        lines += [f"    {method.name}: {_callable_type(module, method)}" for method in service.method]
        lines += ["", f"class {service.name}Servicer:"]
        lines += [_handler(module, method) for method in service.method]
        lines += ["", f"def add_{service.name}Servicer_to_server("]
        lines += [f"    servicer: {service.name}Servicer, server: grpc.Server", ") -> None: ..."]
    return "\n".join(lines) + "\n"


def _types(module: str, method: MethodDescriptorProto) -> tuple[str, str]:
    sent, returned = (name.rsplit(".", 1)[-1] for name in (method.input_type, method.output_type))
    return f"{module}.{sent}", f"{module}.{returned}"


def _callable_type(module: str, method: MethodDescriptorProto) -> str:
    sent, returned = _types(module, method)
    kind = ("Stream" if method.client_streaming else "Unary") + ("Stream" if method.server_streaming else "Unary")
    return f"grpc.{kind}MultiCallable[{sent}, {returned}]"


def _handler(module: str, method: MethodDescriptorProto) -> str:
    sent, returned = _types(module, method)
    request = f"request_iterator: Iterator[{sent}]" if method.client_streaming else f"request: {sent}"
    result = f"Iterator[{returned}]" if method.server_streaming else returned
    return f"    def {method.name}(self, {request}, context: grpc.ServicerContext) -> {result}: ..."


def main(arguments: list[str]) -> int:
    """Write the code, or with ``--check`` name what is outdated and return 1."""
    if arguments not in ([], ["--check"]):
        sys.stderr.write("usage: python proto/generate.py [--check]\n")
        return 2
    if not arguments:
        generate(SOURCE_ROOT)
        return 0
    names = outdated()
    for name in names:
        sys.stderr.write(f"proto/{name} is outdated; run 'python proto/generate.py' and commit the result\n")
    return 1 if names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
