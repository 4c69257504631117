"""Object stores behind something that answers in their place, and stores that refuse: what a restore and a save make of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from allranks.checkpoint import CheckpointConfig, CheckpointManager, CheckpointTier
from allranks.checkpoint.stores import StoreSpec, object_store
from allranks.checkpoint.stores.object_store import ObjectBlobs
from allranks.errors import CheckpointUnreachable, ConfigurationError

from .jobs import make_state
from .s3server import KEY, PAGES, SECRET, Proxy, S3Server, http_answer


def _manager(s3: S3Server, bucket: str, endpoint: str = "", wait_s: float = 0.0) -> CheckpointManager:
    options = {**s3.options(endpoint), "timeout_s": "20", "max_retries": "0"}
    return CheckpointManager(
        CheckpointConfig(
            s3_bucket=bucket,
            s3_prefix="run",
            s3_options=options,
            memory_snapshot_interval=0,
            wait_for_stores_s=wait_s,
        )
    )


def _save(s3: S3Server, bucket: str, step: int, endpoint: str = "") -> bool:
    with _manager(s3, bucket, endpoint) as manager:
        manager.save_checkpoint(make_state(step), CheckpointTier.S3)
        return manager.wait_for_pending_saves(60)


def _newest(s3: S3Server, bucket: str) -> int:
    with _manager(s3, bucket) as manager:
        loaded = manager.load_checkpoint()
        return loaded.step if loaded is not None else 0


@pytest.mark.parametrize("page", PAGES, ids=["plain", "as an object"])
def test_a_page_in_the_place_of_the_store_is_not_an_empty_store(
    s3: S3Server, bucket: str, page: bytes
) -> None:
    """A proxy asks for a password with status 200: training must not begin at step 1, nor believe that it saves."""
    assert _save(s3, bucket, 1)
    with Proxy(s3.ports["s3"], lambda line: page) as proxy:
        with _manager(s3, bucket, proxy.endpoint) as manager, pytest.raises(CheckpointUnreachable):
            manager.load_checkpoint()
        assert not _save(s3, bucket, 2, proxy.endpoint)
    assert _newest(s3, bucket) == 1


def test_a_page_in_the_place_of_a_manifest_sends_no_checkpoint_into_quarantine(
    s3: S3Server, bucket: str
) -> None:
    """The list comes from the store, objects from a proxy that answers with a page: nothing is damaged."""
    assert _save(s3, bucket, 1) and _save(s3, bucket, 2)

    def judge(line: str) -> bytes | None:
        return PAGES[1] if line.startswith("GET") and "manifest.json" in line else None

    with Proxy(s3.ports["s3"], judge) as proxy, _manager(s3, bucket, proxy.endpoint) as manager:
        with pytest.raises(CheckpointUnreachable, match="page"):
            manager.load_checkpoint()
        assert proxy.judged
    assert _newest(s3, bucket) == 2


def test_a_store_that_is_empty_leads_to_step_1(s3: S3Server, bucket: str) -> None:
    """The other side of the two tests above: a real store answers that nothing is there."""
    ObjectBlobs(StoreSpec(f"s3://{bucket}/other", s3.options())).put("x", [memoryview(b"x")], 1)
    assert _newest(s3, bucket) == 0


def _error(code: str, message: str) -> str:
    return f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (
            http_answer("400 Bad Request", _error("ExpiredToken", "The provided token has expired.")),
            "the keys have expired",
        ),
        (
            http_answer("400 Bad Request", _error("InvalidToken", "The token is malformed.")),
            "the keys have expired",
        ),
        (
            http_answer(
                "400 Bad Request",
                _error("AuthorizationHeaderMalformed", "Credential: expecting 'eu-central-1'"),
            ),
            "s3_region",
        ),
        (http_answer("301 Moved Permanently", _error("PermanentRedirect", "use its endpoint")), "s3_region"),
    ],
    ids=["expired", "invalid token", "wrong region", "redirect to another region"],
)
def test_a_refusal_is_not_waited_for_and_has_its_hint(
    s3: S3Server, bucket: str, answer: bytes, hint: str
) -> None:
    """As AWS answers: asking again for a minute does not help, a hint about the network misleads."""
    with Proxy(s3.ports["s3"], lambda line: answer) as proxy:
        with (
            _manager(s3, bucket, proxy.endpoint, wait_s=60.0) as manager,
            pytest.raises(CheckpointUnreachable) as caught,
        ):
            manager.load_checkpoint()
        assert len(proxy.judged) == 1
    assert hint in (caught.value.hint or "")


def test_a_store_without_conditional_puts_is_told_so(
    s3: S3Server, bucket: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The manifest is put on condition; older servers answer that they do not know how."""
    answer = http_answer("501 Not Implemented", _error("NotImplemented", "A header is not implemented"))

    def judge(line: str) -> bytes | None:
        return answer if line.startswith("PUT") and "manifest.json" in line else None

    with Proxy(s3.ports["s3"], judge) as proxy:
        assert not _save(s3, bucket, 1, proxy.endpoint)
        assert proxy.judged
    assert "does not support conditional writes" in caplog.text


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "minio", "ftp://minio:21"])
def test_an_endpoint_without_its_scheme_is_named(endpoint: str) -> None:
    """obstore panics at the first request, in the thread that saves."""
    with pytest.raises(ConfigurationError, match=f"endpoint.*{endpoint}"):
        ObjectBlobs(StoreSpec("s3://bucket", {"endpoint": endpoint}))


def test_keys_that_are_renewed_in_the_credentials_file_are_used_by_the_next_save(
    s3: S3Server, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of a role run out after hours; the service that renews them writes the file anew while the job runs."""
    file = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    options = {key: value for key, value in s3.options().items() if "key" not in key}

    def write(secret: str) -> None:
        file.write_text(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {secret}\n")

    write("run out")
    config = CheckpointConfig(
        s3_bucket=bucket, s3_options={**options, "max_retries": "0"}, memory_snapshot_interval=0
    )
    with CheckpointManager(config) as manager:
        manager.save_checkpoint(make_state(1), CheckpointTier.S3)
        assert not manager.wait_for_pending_saves(60)
        write(SECRET)
        manager.save_checkpoint(make_state(2), CheckpointTier.S3)
        assert manager.wait_for_pending_saves(60)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("http://127.0.0.1:1", "Connection refused"),
        ("http://no-such-host.invalid", "failed to lookup address information"),
        ("silent", "timed out"),
    ],
)
def test_why_a_store_cannot_be_reached_is_said(endpoint: str, reason: str) -> None:
    """Of "error sending request" nobody learns whether the name, the port or the firewall is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}" if endpoint == "silent" else endpoint
        options = {"endpoint": address, "access_key_id": "a", "secret_access_key": "b"}
        blobs = ObjectBlobs(StoreSpec("s3://bucket", {**options, "timeout_s": "1", "max_retries": "0"}))
        with pytest.raises(OSError, match=reason):
            blobs.keys("")


XML = "Content-Type: application/xml\r\n"


def _listing(keys: list[str], truncated: bool = False, token: str = "") -> bytes:
    """A page of ListObjectsV2, with or without a token to continue with."""
    entries = "".join(
        f"<Contents><Key>{key}</Key><LastModified>2026-11-16T06:00:00.000Z</LastModified><ETag>&quot;x&quot;</ETag>"
        "<Size>1</Size><StorageClass>STANDARD</StorageClass></Contents>"
        for key in keys
    )
    head = f"<Name>b</Name><Prefix>run/</Prefix><KeyCount>{len(keys)}</KeyCount><MaxKeys>1000</MaxKeys>"
    flag = f"<IsTruncated>{str(truncated).lower()}</IsTruncated>"
    flag += f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    return http_answer("200 OK", f"<ListBucketResult>{head}{flag}{entries}</ListBucketResult>", XML)


def _is_list(line: str) -> bool:
    return line.startswith("GET") and "list-type=2" in line


FIRST = "run/checkpoint_step_00000001/manifest.json"
NO_LISTS = {
    "an empty page that says there is more": _listing([], truncated=True),
    "an empty page that is out of date": _listing([]),
    "the same page again and again": _listing([FIRST], truncated=True),
    "nothing": http_answer("200 OK", "", XML),
    "no content": http_answer("204 No Content", ""),
    "part of something": http_answer("206 Partial Content", "", XML),
    "a list of buckets": http_answer(
        "200 OK", "<ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>", XML
    ),
    "an error with status 200": http_answer("200 OK", _error("InternalError", "try again"), XML),
    "JSON": http_answer("200 OK", "{}", "Content-Type: application/json\r\n"),
    "a redirect to nowhere": http_answer("302 Found", "", "Location: http://127.0.0.1:1/login\r\n"),
    "a redirect without a place": http_answer(
        "307 Temporary Redirect", _error("TemporaryRedirect", "x"), XML
    ),
    "not modified": http_answer("304 Not Modified", ""),
}


@pytest.mark.parametrize("answer", NO_LISTS.values(), ids=NO_LISTS)
def test_a_list_that_cannot_be_true_is_no_empty_store(s3: S3Server, bucket: str, answer: bytes) -> None:
    """Objects can be read, the list of them cannot be trusted: never step 1, nor an older step."""
    assert _save(s3, bucket, 1) and _save(s3, bucket, 2)
    with Proxy(s3.ports["s3"], lambda line: answer if _is_list(line) else None) as proxy:
        with _manager(s3, bucket, proxy.endpoint) as manager, pytest.raises(CheckpointUnreachable):
            manager.load_checkpoint()
        assert proxy.judged
    assert _newest(s3, bucket) == 2


class _Hostile:
    """Speaks HTTP and answers every request with what `answer(number of the request)` gives, one piece after the other."""

    def __init__(self, answer: Callable[[int], Iterable[bytes]]) -> None:
        self._listener, self._asked = socket.create_server(("127.0.0.1", 0)), 0
        self._answer, self._connections = answer, list[socket.socket]()
        self._threads = [threading.Thread(target=self._accept, name="hostile", daemon=True)]
        self._threads[0].start()
        options = {"endpoint": f"http://127.0.0.1:{self._listener.getsockname()[1]}", "access_key_id": "a"}
        options |= {"secret_access_key": "b", "timeout_s": "2", "max_retries": "0"}
        self.blobs = ObjectBlobs(StoreSpec("s3://bucket/run", options))

    def __enter__(self) -> ObjectBlobs:
        return self.blobs

    def __exit__(self, *_: object) -> None:
        for sock in (self._listener, *self._connections):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                thread = threading.Thread(target=self._serve, args=(connection,), name="hostile", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            while connection.recv(1 << 16):
                self._asked += 1
                for piece in self._answer(self._asked):
                    connection.sendall(piece)


def _large(status: str, headers: str = "") -> Callable[[int], Iterator[bytes]]:
    """An object of a terabyte, as it says."""
    head = f"HTTP/1.1 {status}\r\nContent-Length: {1 << 40}\r\n{_OBJECT}{headers}\r\n"

    def answer(_: int) -> Iterator[bytes]:
        yield head.encode()
        while True:
            yield bytes(1 << 16)

    return answer


_OBJECT = 'ETag: "x"\r\nLast-Modified: Mon, 16 Nov 2026 06:00:00 GMT\r\n'


def test_an_object_of_a_terabyte_in_place_of_a_manifest_is_not_read() -> None:
    """obstore reserves as much memory as the answer claims, and aborts the whole process where it cannot."""
    with _Hostile(_large("200 OK")) as blobs, pytest.raises(OSError, match="1099511627776 bytes"):
        blobs.get("manifest.json")


def test_of_an_answer_that_is_longer_than_asked_for_only_so_much_is_read() -> None:
    """The head is right, the body does not end."""
    hostile = _Hostile(_large("206 Partial Content", "Content-Range: bytes 0-99/1000\r\n"))
    with hostile as blobs, pytest.raises(OSError, match="more than the 100 bytes"):
        blobs.get_range("data", 0, [memoryview(bytearray(100))])


def test_a_list_without_end_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page says how to go on."""
    monkeypatch.setattr(object_store, "MAX_KEYS", 5000)

    def answer(number: int) -> list[bytes]:
        page = _listing([f"run/{number:06d}/{entry}" for entry in range(1000)], True, f"t{number}")
        return [page.replace(b"Connection: close\r\n", b"")]

    with _Hostile(answer) as blobs, pytest.raises(OSError, match="list of objects"):
        blobs.keys("")


def test_what_a_store_says_cannot_move_the_cursor_of_a_terminal() -> None:
    """Its errors end up in logs and on screens."""
    text = _error("\x1b[31mRED\x1b]0;title\x07", "two\r\nlines \x1b[2J")
    with _Hostile(lambda _: [http_answer("400 Bad Request", text)]) as blobs:
        with pytest.raises(OSError, match="RED") as caught:
            blobs.get("manifest.json")
        assert str(caught.value).isprintable()
