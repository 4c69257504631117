"""Unknown clients, garbage and floods: refused or bounded, said in the log, and the service is unharmed."""

from __future__ import annotations

import logging
import os
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from allranks.channel.frames import HEAD, split_address
from allranks.errors import LighthouseRefused, LighthouseUnreachable
from allranks.lighthouse.client.client import Client, ClientOptions
from allranks.lighthouse.messages import PREAMBLE, Hello, Join, Proof, encode
from allranks.lighthouse.options import ServerOptions
from allranks.lighthouse.server import Lighthouse
from allranks.model.cluster import Member, PublishedIncident

from .processes import LighthouseProcess
from .waiting import eventually

#: Where no token is asked for, hello and (any) proof can be sent at once.
HELLO = PREAMBLE + encode(Hello(replica="g")) + encode(Proof(""))
Embedded = Callable[..., Lighthouse]
Connect = Callable[..., Client]


def raw(lighthouse: Lighthouse) -> socket.socket:
    """A plain TCP connection to it."""
    host, port = lighthouse.address.rsplit(":", 1)
    sock = socket.create_connection((host, int(port)), 20)
    sock.settimeout(20)
    return sock


def framed(kind: int, payload: bytes) -> bytes:
    """A frame with these very bytes."""
    return HEAD.pack(len(payload), kind) + payload


def read_all(sock: socket.socket) -> bytes:
    """Everything until the other side closes."""
    data = b""
    try:
        while chunk := sock.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def assert_serves(lighthouse: Lighthouse, connect: Connect, **options: object) -> None:
    """A right client still gets its quorum."""
    assert_serves_at(lighthouse.address, connect, **options)


def assert_serves_at(address: str, connect: Connect, **options: object) -> None:
    """Likewise."""
    client = connect(address, "honest", **options)
    assert client.join(Member("honest"), timeout_s=30).names == ("honest",)


def test_a_wrong_token_is_refused_with_a_hint(embedded: Embedded, connect: Connect) -> None:
    """The client says what to do; the lighthouse serves on."""
    lighthouse = embedded(ServerOptions(token="right"))
    for token, words in (("wrong", "token is wrong"), ("", "no job token")):
        with pytest.raises(LighthouseRefused, match=words) as caught:
            Client(ClientOptions(addresses=(lighthouse.address,), token=token, replica="a")).start(20)
        assert caught.value.code == "token"
        assert "ALLRANKS_TOKEN" in caught.value.hint
    assert_serves(lighthouse, connect, token="right")


def test_the_token_comes_from_a_file_when_the_environment_says_so(
    embedded: Embedded, connect: Connect, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No token on a command line, where everybody could read it."""
    (tmp_path / "token").write_text("right\n")
    monkeypatch.setenv("ALLRANKS_TOKEN_FILE", str(tmp_path / "token"))
    assert_serves(embedded(ServerOptions(token="right")), connect)


def test_another_version_is_refused_by_name(embedded: Embedded) -> None:
    """Both versions are in the answer."""
    with raw(embedded()) as sock:
        sock.sendall(PREAMBLE + encode(Hello(version=99, replica="a")))
        assert b"speaks version 2, the client 99" in read_all(sock)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 64,
        PREAMBLE + b"\0\0\0\x05\x01nope!",
        PREAMBLE + HEAD.pack(4, 200) + b"what",
        PREAMBLE + encode(Join(Member("a"))),
        PREAMBLE + HEAD.pack(6, 0x81) + b"zipped",
        PREAMBLE + framed(1, b'{"nonce":"\xed\xa0\x80"}'),
        PREAMBLE + framed(1, b"[" * 15000),
        PREAMBLE + framed(1, b'{"a":' + b"[" * 15000),
        HELLO + framed(2, b'{"health":"\xff"}'),
        HELLO + framed(2, b'{"a":' + b"[" * 15000),
        HELLO + HEAD.pack(3, 2) + b"[[[",
        HELLO + HEAD.pack(2, 99) + b"{}",
    ],
    ids=[
        "tls",
        "zeros",
        "no-json",
        "unknown-kind",
        "no-hello",
        "bad-deflate",
        "surrogate",
        "deep-json",
        "deep-unknown-field",
        "beat-utf8",
        "deep-beat",
        "bad-beat",
        "bad-notice",
    ],
)
def test_garbage_is_closed_and_said_in_the_log(
    embedded: Embedded, connect: Connect, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    """Whatever arrives, only that connection suffers."""
    lighthouse = embedded()
    with caplog.at_level(logging.WARNING), raw(lighthouse) as sock:
        sock.sendall(data)
        read_all(sock)
        eventually(lambda: "refused (garbage)" in caplog.text)
    assert "Traceback" not in caplog.text
    assert_serves(lighthouse, connect)


@pytest.mark.parametrize("hello", [False, True], ids=["unknown", "client"])
def test_an_oversized_frame_is_refused_before_it_is_read(
    embedded: Embedded, connect: Connect, hello: bool
) -> None:
    """The length alone is enough to say no."""
    lighthouse = embedded(ServerOptions(max_frame_bytes=1 << 20))
    with raw(lighthouse) as sock:
        sock.sendall(
            PREAMBLE
            + (encode(Hello(replica="fat")) + encode(Proof("")) if hello else b"")
            + HEAD.pack(1 << 30, 1)
        )
        assert b"at most" in read_all(sock)
    assert_serves(lighthouse, connect)


def test_a_client_that_never_finishes_its_hello_is_dropped(
    embedded: Embedded, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """Slow loris: one byte and silence."""
    lighthouse = embedded(ServerOptions(hello_timeout_s=0.2))
    with caplog.at_level(logging.WARNING), raw(lighthouse) as sock:
        sock.sendall(PREAMBLE[:1])
        assert read_all(sock) == b""
    assert "did not authenticate in time" in caplog.text
    assert_serves(lighthouse, connect)


def test_a_flood_of_half_open_connections_is_bounded(
    embedded: Embedded, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """The oldest unknown clients go; real clients get in all the while; the log is not flooded."""
    lighthouse = embedded(ServerOptions(max_unauthenticated=64))
    with ExitStack() as open_ones, caplog.at_level(logging.WARNING):
        for _ in range(600):
            open_ones.enter_context(raw(lighthouse))
        assert_serves(lighthouse, connect)
        lines = [
            record
            for record in caplog.records
            if "too many connections that did not authenticate" in record.message
        ]
        assert 1 <= len(lines) < 100


@pytest.mark.soak
def test_ten_thousand_half_open_connections_do_no_harm(embedded: Embedded, connect: Connect) -> None:
    """The same with the number of the specification."""
    lighthouse = embedded()
    with ExitStack() as open_ones:
        for _ in range(10_000):
            open_ones.enter_context(raw(lighthouse))
        assert_serves(lighthouse, connect)


def test_a_client_that_reads_nothing_is_cut_off(embedded: Embedded, connect: Connect) -> None:
    """Its unread notices must not eat the lighthouse's memory."""
    lighthouse = embedded(heartbeat_timeout_s=600)
    observer = connect(lighthouse.address, role="observer")
    with raw(lighthouse) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.sendall(
            PREAMBLE + encode(Hello(role="observer", node="silent", session="silent")) + encode(Proof(""))
        )
        eventually(lambda: lighthouse.status().connections == 2)
        name = os.urandom(400_000).hex()  # nothing that deflate could shrink to a few bytes
        for i in range(200):  # how much the kernel swallows first is its own affair
            observer.collect("much to read", [f"{i}{name}"])
            if lighthouse.call(lambda service: len(service.sessions.by_replica)) == 1:
                break
        eventually(lambda: lighthouse.status().connections == 1)


def test_http_is_told_apart_from_frames(embedded: Embedded, connect: Connect) -> None:
    """One port: a browser gets an HTTP answer, a client its quorum."""
    lighthouse = embedded()
    with raw(lighthouse) as sock:
        sock.sendall(b"GET /nothing-here HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert read_all(sock).startswith(b"HTTP/1.1 404")
    assert_serves(lighthouse, connect)


def test_it_listens_on_loopback_unless_told_otherwise(embedded: Embedded) -> None:
    """The default of the options, and thus of everything built on them."""
    assert embedded().address.startswith("127.0.0.1:")


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_everywhere_means_ipv4_and_ipv6(embedded: Embedded, connect: Connect) -> None:
    """`[::]`, torchft's default; the address that is printed works as well."""
    lighthouse = embedded(ServerOptions(host="::"))
    port = lighthouse.address.rpartition(":")[2]
    for number, address in enumerate((f"127.0.0.1:{port}", f"[::1]:{port}", lighthouse.address)):
        assert connect(address, f"r{number}").status()["leading"] is True


# ---- TLS --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """ca.pem, and server / client certificates signed by it, made by openssl."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=300)

    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2",
            "-addext", "keyUsage=critical,keyCertSign,cRLSign",  # Python 3.13 insists
            "-subj", "/CN=test ca", "-keyout", "ca.key", "-out", "ca.pem")  # fmt: skip
    for name in ("server", "client"):
        (folder / f"{name}.ext").write_text(
            "subjectAltName=IP:127.0.0.1,DNS:localhost\nauthorityKeyIdentifier=keyid\n"
        )
        openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}",
                "-keyout", f"{name}.key", "-out", f"{name}.csr")  # fmt: skip
        openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial",
                "-days", "2", "-extfile", f"{name}.ext", "-out", f"{name}.pem")  # fmt: skip
    yield folder


def test_tls_clients_check_the_server(embedded: Embedded, connect: Connect, certificates: Path) -> None:
    """With the right CA it works, also through a beacon; a client that trusts others does not connect."""
    pem = {name: str(certificates / name) for name in ("ca.pem", "server.pem", "server.key", "client.pem")}
    lighthouse = embedded(ServerOptions(certificate=pem["server.pem"], key=pem["server.key"]))
    assert_serves(lighthouse, connect, ca=pem["ca.pem"])
    beacon = connect(lighthouse.address, "with-beacon", ca=pem["ca.pem"], beacon=True)
    assert beacon.status()["leading"] is True
    with pytest.raises(LighthouseUnreachable, match=r"certificate is not trusted by \S+client.pem: "):
        Client(ClientOptions(addresses=(lighthouse.address,), replica="a", ca=pem["client.pem"])).start(1.5)


def test_silent_connections_do_not_keep_members_from_a_lighthouse_with_tls(
    embedded: Embedded, connect: Connect, certificates: Path
) -> None:
    """They count before their handshake is over; what is not TLS, and half a handshake, is dropped like any unknown client."""
    pem = {path.name: str(path) for path in certificates.iterdir()}
    key, limits = pem["server.key"], {"max_unauthenticated": 64, "hello_timeout_s": 600.0}
    lighthouse = embedded(ServerOptions(certificate=pem["server.pem"], key=key, **limits))
    with ExitStack() as open_ones:
        sockets = [open_ones.enter_context(raw(lighthouse)) for _ in range(300)]
        for sock, said in zip(
            sockets[-3:], (b"\x16\x03\x01", b"GET / HTTP/1.1\r\n\r\n", PREAMBLE), strict=True
        ):
            sock.sendall(said)
        assert_serves(lighthouse, connect, ca=pem["ca.pem"])
        closed = [sock for sock in sockets[:200] if read_all(sock) == b""]
        assert len(closed) == 200


def test_mtls_refuses_clients_without_a_certificate(
    embedded: Embedded, connect: Connect, certificates: Path
) -> None:
    """Only those signed by our CA come in."""
    pem = {path.name: str(path) for path in certificates.iterdir()}
    lighthouse = embedded(
        ServerOptions(certificate=pem["server.pem"], key=pem["server.key"], client_ca=pem["ca.pem"])
    )
    assert_serves(lighthouse, connect, ca=pem["ca.pem"], certificate=pem["client.pem"], key=pem["client.key"])
    with pytest.raises(LighthouseUnreachable):
        Client(ClientOptions(addresses=(lighthouse.address,), replica="a", ca=pem["ca.pem"])).start(1.5)
    with pytest.raises((ssl.SSLError, ConnectionError, OSError)), raw(lighthouse) as sock:
        context = ssl.create_default_context(cafile=pem["ca.pem"])
        with context.wrap_socket(sock, server_hostname="127.0.0.1") as secure:
            secure.sendall(PREAMBLE + encode(Hello(replica="a")))
            if not secure.recv(1):
                raise ConnectionError("closed")


ESCAPE = "\x1b]0;owned\x07"


@pytest.mark.parametrize("field", ["replica", "node", "session"])
def test_a_name_that_would_steer_a_terminal_is_refused(embedded: Embedded, field: str) -> None:
    """It would be printed in every log and every status."""
    options = {"replica": "a"} | {field: f"a{ESCAPE}"}
    with pytest.raises(LighthouseRefused, match="printable"):
        Client(ClientOptions(addresses=(embedded().address,), **options)).start(20)  # type: ignore[arg-type]


def test_reasons_and_incidents_are_shown_without_control_characters(
    embedded: Embedded, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    """In events, the log, the status and the notices of others."""
    lighthouse = embedded()
    watcher, member = connect(lighthouse.address, "w", role="observer"), connect(lighthouse.address, "a")
    member.join(Member("a"), timeout_s=30)
    with caplog.at_level(logging.INFO):
        watcher.report_incident(
            PublishedIncident("i-1", f"bad{ESCAPE}", replicas=(f"a{ESCAPE}",), path=f"/{ESCAPE}")
        )
        watcher.evict("a", f"tired{ESCAPE}")
        member.leave(f"gone{ESCAPE}")
        eventually(lambda: "a left" in str(lighthouse.status()))
    shown = str(lighthouse.status())
    assert "tired" in shown and "bad" in shown
    assert "\\x1b" not in shown and "\x1b" not in caplog.text


def test_members_get_in_when_unknown_clients_use_up_the_descriptors(
    run_lighthouse: Callable[..., LighthouseProcess], connect: Connect
) -> None:
    """A low limit of open files: unknown clients have a part of it, never all."""
    lighthouse = run_lighthouse(prefix=("sh", "-c", 'ulimit -n 128; exec "$@"', "sh"))
    with ExitStack() as stack:
        for _ in range(300):
            stack.enter_context(socket.create_connection(split_address(lighthouse.address), 20))
        assert_serves_at(lighthouse.address, connect)
