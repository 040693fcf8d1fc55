"""Command line: `fttransport serve` offers a file as a source, `fttransport fetch` gets a state."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from fttransport.address import join_metadata
from fttransport.errors import TransportError
from fttransport.http_transport import HTTPTransport
from fttransport.security import Security

try:
    import typer
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    from safetensors.torch import load_file, save_file
except ImportError as error:
    text = "the command line needs more; run: pip install 'fttransport[cli]'"
    raise ModuleNotFoundError(text, name=error.name) from error

app = typer.Typer(
    help="Serve the state of a replica, and fetch it.", no_args_is_help=True, add_completion=False
)

Step = Annotated[int, typer.Option(help="The step that the state is of.")]
TokenFile = Annotated[
    Path | None, typer.Option(help="A file with the token that both sides share.")
]
MacFile = Annotated[
    Path | None, typer.Option(help="A file with the key that proves a state to be its source's.")
]
TlsCert = Annotated[
    Path | None, typer.Option(help="This side's certificate (PEM); makes a source's address https.")
]
TlsKey = Annotated[Path | None, typer.Option(help="Its key, where it is not in the same file.")]
TlsCa = Annotated[
    Path | None, typer.Option(help="Whose certificates to trust (PEM); a source then asks for one.")
]


@app.command()
def serve(
    file: Annotated[Path, typer.Argument(help="A safetensors file.", dir_okay=False)],
    *,
    step: Step,
    token_file: TokenFile = None,
    mac_file: MacFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    bind: Annotated[str | None, typer.Option(help="Where to listen; '' for everywhere.")] = None,
    port: Annotated[int, typer.Option(help="The port; 0 for any.")] = 0,
    interface: Annotated[str | None, typer.Option(help="Listen on its address.")] = None,
    advertise: Annotated[
        list[str] | None, typer.Option(help="The host by which others reach this one.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(help="How long; without it, for ever.")] = None,
) -> None:
    """Serve a file's tensors until interrupted. Prints the metadata for `fetch` on one line."""
    with _told():
        tls = _serving_tls(tls_cert, tls_key, tls_ca)
        transport: HTTPTransport[dict[str, Tensor]] = HTTPTransport(
            timedelta(seconds=60),
            0,
            security=_security(token_file, mac_file, tls),
            bind=bind,
            port=port,
            interface=interface,
            advertise=advertise,
        )
        try:
            transport.send_checkpoint([], step, load_file(file), timedelta(0))
            typer.echo(transport.metadata())
            threading.Event().wait(seconds)
        except KeyboardInterrupt:
            Console(stderr=True).print("interrupted")
        finally:
            transport.shutdown()


@app.command()
def fetch(
    metadata: Annotated[list[str], typer.Argument(help="What each source's `serve` printed.")],
    *,
    step: Step,
    output: Annotated[Path, typer.Option("--output", "-o", help="The safetensors file to write.")],
    token_file: TokenFile = None,
    mac_file: MacFile = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    timeout: Annotated[float, typer.Option(help="Seconds for everything together.")] = 600,
    streams: Annotated[int, typer.Option(help="How many ranges are fetched at once.")] = 0,
) -> None:
    """Fetch a state from all sources at once into a file, which appears whole or not at all."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True))
    task = bar.add_task(f"step {step}", total=None)

    def show(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    with _told():
        limit = timedelta(seconds=timeout)
        security = _security(token_file, mac_file, _fetching_tls(tls_cert, tls_key, tls_ca))
        receiver: HTTPTransport[Any] = HTTPTransport(
            limit, streams, security=security, bind="127.0.0.1", progress=show
        )
        try:
            with bar:
                state = receiver.recv_checkpoint(0, join_metadata(metadata), step, limit)
            _write(state, output)
        finally:
            receiver.shutdown()
    typer.echo(f"{output}: {receiver.last_report}")


@contextmanager
def _told() -> Iterator[None]:
    """Print an error and leave with status 1, instead of a traceback."""
    try:
        yield
    except (TransportError, OSError, ValueError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error


def _serving_tls(cert: Path | None, key: Path | None, ca: Path | None) -> ssl.SSLContext | None:
    """The TLS context of a source, from files; with `ca` it lets in whom that has signed."""
    if cert is None:
        if key is not None or ca is not None:
            raise ValueError("a source that is given --tls-key or --tls-ca needs --tls-cert too")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    if ca is not None:
        context.load_verify_locations(ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _fetching_tls(cert: Path | None, key: Path | None, ca: Path | None) -> ssl.SSLContext | None:
    """The TLS context of a receiver; None leaves it to the addresses, with the system's trust."""
    if cert is None and ca is None:
        if key is not None:
            raise ValueError("--tls-key needs --tls-cert too")
        return None
    context = ssl.create_default_context(cafile=ca)
    if cert is not None:
        context.load_cert_chain(cert, key)
    return context


def _security(
    token_file: Path | None, mac_file: Path | None, tls: ssl.SSLContext | None
) -> Security:
    token = None if token_file is None else token_file.read_text("ascii").strip()
    mac = None if mac_file is None else mac_file.read_bytes().strip()
    return Security(token=token, mac=mac, tls=tls)


def _write(state: object, output: Path) -> None:
    """Write the tensors of a state; nested dicts become names with dots."""
    tensors: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in _named(state, ""):
        if name in tensors:
            raise ValueError(f"two tensors of the state would be called {name!r}")
        # The format takes no tensors that share memory.
        pointer = tensor.untyped_storage().data_ptr()
        alone = tensor.detach().contiguous()
        tensors[name] = alone.clone() if pointer in seen else alone
        seen.add(pointer)
    if not tensors:
        raise ValueError("the state has no tensors that a safetensors file could hold")
    partial = output.with_name(f"{output.name}.partial")
    try:
        save_file(tensors, partial)
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)


def _named(state: object, prefix: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(state, Tensor):
        yield prefix, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _named(value, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(state, list | tuple):
        for index, value in enumerate(state):
            yield from _named(value, f"{prefix}.{index}" if prefix else str(index))
