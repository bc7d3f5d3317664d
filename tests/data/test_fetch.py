"""Downloads from a local server that breaks off, ignores ranges, lies, fails, and recovers."""

import dataclasses
import gzip
import hashlib
import io
import struct
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
import pytest

from fulcrum.data import fetch, load, verify_dataset
from fulcrum.data.sources.public import archive, download, registry
from fulcrum.errors import ConfigError, DataError, DownloadError


class QuietServer(ThreadingHTTPServer):
    """Says nothing when a client hangs up, which is part of the play."""

    def handle_error(self, request, client_address):
        pass


class Server:
    """Serves `files` (path -> bytes). `moods` (path -> list) says how; the last mood stays."""

    def __init__(self):
        self.files, self.moods, self.seen = {}, {}, []
        self.stop = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                owner.answer(self)

            def log_message(self, *_):
                pass

        self.http = QuietServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def close(self):
        self.stop.set()
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()

    def url(self, mirror):
        return f"http://127.0.0.1:{self.http.server_address[1]}/{mirror}"

    def answer(self, request):
        path, asked = request.path, request.headers.get("Range")
        self.seen.append((path, asked))
        moods = self.moods.get(path) or ["ok"]
        mood = moods.pop(0) if len(moods) > 1 else moods[0]
        request.close_connection = True
        if mood.isdigit() or path not in self.files:
            return self.send(request, int(mood) if mood.isdigit() else 404, {}, b"no")
        data = self.files[path]
        if mood == "stall":
            self.stop.wait(5)
            return None
        if mood == "lie":
            data = bytes(b ^ 1 for b in data)
        if mood == "announce":
            return self.send(request, 200, {"Content-Length": str(10**12)}, data)
        if mood == "endless":
            return self.send(request, 200, {"Content-Length": None}, bytes(4 << 20))
        if mood == "no-length":
            return self.send(request, 200, {"Content-Length": None}, data)
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and not mood.startswith("whole") else 0
        if start >= len(data):
            return self.send(request, 416, {"Content-Range": f"bytes */{len(data)}"}, b"")
        code = 206 if start else 200
        headers = {"Content-Range": f"bytes {start}-{len(data) - 1}/{len(data)}"} if start else {}
        if mood == "wrong-range" and start:
            headers = {"Content-Range": f"bytes 0-{len(data) - 1}/{len(data)}"}
        headers["Content-Length"] = str(len(data) - start)
        body = data[start:]
        return self.send(request, code, headers, body[: len(body) // 2] if mood.endswith("break") else body)

    def send(self, request, code, headers, body):
        request.send_response(code)
        for key, value in {"Content-Length": str(len(body)), "Connection": "close", **headers}.items():
            if value is not None:
                request.send_header(key, value)
        request.end_headers()
        request.wfile.write(body)


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = Server()
    yield running
    running.close()


ARRAYS = [
    np.random.default_rng(0).integers(0, 256, (30, 28, 28), dtype=np.uint8),
    np.arange(30, dtype=np.uint8) % 10,
    np.random.default_rng(1).integers(0, 256, (9, 28, 28), dtype=np.uint8),
    np.arange(9, dtype=np.uint8),
]
NAMES = [file.name + ".gz" for file in registry.MNIST.files]
IMAGES = NAMES[0]


def idx_bytes(array):
    return bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


@pytest.fixture
def mirrors(server, monkeypatch):
    """A tiny mnist on mirrors a and b; b compresses differently, as mirrors do."""
    files = tuple(
        dataclasses.replace(
            file, shape=array.shape, digest=registry.compute_content_digest(idx_bytes(array), "sha256:"), download=1000
        )
        for file, array in zip(registry.MNIST.files, ARRAYS, strict=True)
    )
    monkeypatch.setitem(registry.PUBLIC_DATASETS, "mnist", dataclasses.replace(registry.MNIST, files=files))
    for name, array in zip(NAMES, ARRAYS, strict=True):
        server.files[f"/a/{name}"] = gzip.compress(idx_bytes(array), 1, mtime=0)
        server.files[f"/b/{name}"] = gzip.compress(idx_bytes(array), 9, mtime=5)
    return [server.url("a"), server.url("b/")]


def get(tmp_path, mirrors, **options):
    return fetch("mnist", tmp_path, mirrors, pause=0.0, timeout=options.pop("timeout", 5.0), **options)


def check_clean(tmp_path):
    """All files are public, nothing half-written is left, and the data loads without a warning."""
    assert [status for _, status in verify_dataset("mnist", str(tmp_path))] == ["public"] * 4
    assert list(tmp_path.rglob("*.part")) == []
    assert load("mnist", str(tmp_path)).warnings == ()


def requests_for(server, path):
    return [asked for seen, asked in server.seen if seen == path]


def test_a_plain_download(server, mirrors, tmp_path):
    calls = []
    place = get(tmp_path, mirrors, progress=lambda done, total: calls.append((done, total)))
    assert place == tmp_path / "mnist"
    check_clean(tmp_path)
    assert all(path.startswith("/a/") for path, _ in server.seen)
    size = sum(len(server.files[f"/a/{name}"]) for name in NAMES)
    assert calls[-1] == (size, size)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert all(done <= total for done, total in calls)


def test_what_is_there_is_not_fetched_again(server, mirrors, tmp_path):
    place = get(tmp_path, mirrors)
    (place / NAMES[1]).unlink()
    server.seen.clear()
    get(tmp_path, mirrors)
    assert server.seen == [(f"/a/{NAMES[1]}", None)]


def test_a_broken_download_resumes_where_it_stopped(server, mirrors, tmp_path):
    path = f"/a/{IMAGES}"
    server.moods[path] = ["break", "break", "ok"]
    get(tmp_path, mirrors)
    check_clean(tmp_path)
    size = len(server.files[path])
    half = size // 2
    assert requests_for(server, path) == [None, f"bytes={half}-", f"bytes={half + (size - half) // 2}-"]
    assert not requests_for(server, f"/b/{IMAGES}")


def test_a_later_process_resumes_too(server, mirrors, tmp_path):
    path = f"/a/{IMAGES}"
    server.moods[path] = ["break", "404"]
    with pytest.raises(DownloadError, match="HTTP 404"):
        get(tmp_path, mirrors[:1])
    assert not (tmp_path / "mnist" / IMAGES).exists()
    server.moods[path] = ["ok"]
    server.seen.clear()
    get(tmp_path, mirrors[:1])
    assert requests_for(server, path) == [f"bytes={len(server.files[path]) // 2}-"]
    check_clean(tmp_path)


def test_a_server_that_ignores_ranges_sends_everything_again(server, mirrors, tmp_path):
    path = f"/a/{IMAGES}"
    server.moods[path] = ["whole-break", "whole-break", "whole"]
    get(tmp_path, mirrors)
    assert len(requests_for(server, path)) == 3
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == server.files[path]
    check_clean(tmp_path)


def test_a_server_that_sends_another_range_is_not_believed(server, mirrors, tmp_path):
    path = f"/a/{IMAGES}"
    server.moods[path] = ["break", "wrong-range", "ok"]
    get(tmp_path, mirrors)
    assert requests_for(server, path)[2] is None
    check_clean(tmp_path)


def test_a_mirror_that_breaks_off_for_good_is_left(server, mirrors, tmp_path):
    server.moods[f"/a/{IMAGES}"] = ["break", "500"]
    get(tmp_path, mirrors)
    assert len(requests_for(server, f"/a/{IMAGES}")) == 1 + download.MAX_FRUITLESS_ATTEMPTS
    assert requests_for(server, f"/b/{IMAGES}") == [None]  # another mirror's bytes are not continued
    check_clean(tmp_path)


def test_a_lying_mirror_is_discarded(server, mirrors, tmp_path):
    server.moods[f"/a/{IMAGES}"] = ["lie"]
    get(tmp_path, mirrors)
    assert len(requests_for(server, f"/a/{IMAGES}")) == 1
    assert (tmp_path / "mnist" / IMAGES).read_bytes() == server.files[f"/b/{IMAGES}"]
    check_clean(tmp_path)


def test_only_liars_give_an_error_and_no_file(server, mirrors, tmp_path):
    for mirror in "ab":
        server.moods[f"/{mirror}/{IMAGES}"] = ["lie"]
    with pytest.raises(DownloadError) as caught:
        get(tmp_path, mirrors)
    assert str(caught.value).count("the checksum is wrong") == 2
    assert server.url("a") in str(caught.value)
    assert not (tmp_path / "mnist" / IMAGES).exists()
    assert list(tmp_path.rglob("*.part")) == []


def test_right_content_that_is_another_valid_file_is_a_lie(server, mirrors, tmp_path):
    """A well-formed idx file with other images passes every check but the checksum."""
    server.files[f"/a/{IMAGES}"] = gzip.compress(idx_bytes(ARRAYS[0] ^ np.uint8(1)))
    get(tmp_path, mirrors)
    check_clean(tmp_path)


def test_a_stale_part_is_not_the_mirrors_fault(server, mirrors, tmp_path):
    path = f"/a/{IMAGES}"
    part = download._part_file_path(tmp_path / "mnist" / IMAGES, server.url("a") + f"/{IMAGES}")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"x" * 100)
    get(tmp_path, mirrors[:1])
    assert requests_for(server, path) == ["bytes=100-", None]
    check_clean(tmp_path)


@pytest.mark.parametrize("extra", [b"", b"too much"])
def test_a_part_that_is_complete_or_too_long(server, mirrors, tmp_path, extra):
    path = f"/a/{IMAGES}"
    part = download._part_file_path(tmp_path / "mnist" / IMAGES, server.url("a") + f"/{IMAGES}")
    part.parent.mkdir(parents=True)
    part.write_bytes(server.files[path] + extra)
    get(tmp_path, mirrors[:1])
    assert requests_for(server, path) == [f"bytes={len(server.files[path] + extra)}-"] + [None] * bool(extra)
    check_clean(tmp_path)


@pytest.mark.parametrize("code", ["404", "403", "410"])
def test_a_lasting_refusal_is_not_asked_twice(server, mirrors, tmp_path, code):
    server.moods[f"/a/{IMAGES}"] = [code]
    get(tmp_path, mirrors)
    assert len(requests_for(server, f"/a/{IMAGES}")) == 1
    check_clean(tmp_path)


@pytest.mark.parametrize("code", ["500", "503", "429"])
def test_a_passing_refusal_is_retried(server, mirrors, tmp_path, code):
    server.moods[f"/a/{IMAGES}"] = [code, code, "ok"]
    get(tmp_path, mirrors)
    assert len(requests_for(server, f"/a/{IMAGES}")) == 3
    assert not requests_for(server, f"/b/{IMAGES}")
    check_clean(tmp_path)


@pytest.mark.parametrize("mood", ["announce", "endless"])
def test_too_many_bytes_are_not_taken(server, mirrors, tmp_path, mood):
    server.moods[f"/a/{IMAGES}"] = [mood]
    most = []
    get(tmp_path, mirrors, progress=lambda done, total: most.append(done))
    assert len(requests_for(server, f"/a/{IMAGES}")) == 1
    assert max(most) < 2 << 20  # of the 4 MB that an endless server has sent so far
    check_clean(tmp_path)


def test_a_server_that_names_no_length_is_fine(server, mirrors, tmp_path):
    server.moods[f"/a/{IMAGES}"] = ["no-length"]
    get(tmp_path, mirrors)
    check_clean(tmp_path)


def test_a_silent_server_is_left_after_the_timeout(server, mirrors, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "MAX_FRUITLESS_ATTEMPTS", 1)
    server.moods[f"/a/{IMAGES}"] = ["stall"]
    get(tmp_path, mirrors, timeout=0.2)
    check_clean(tmp_path)


def test_nobody_listens(tmp_path, server, mirrors):
    with pytest.raises(DownloadError, match=r"refused|Connection"):
        get(tmp_path, ["http://127.0.0.1:1/"])
    get(tmp_path, ["http://127.0.0.1:1/", *mirrors])
    check_clean(tmp_path)


def test_pauses_grow(server, mirrors, tmp_path, monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr(download.time, "sleep", waits.append)
    server.moods[f"/a/{IMAGES}"] = ["500"]
    fetch("mnist", tmp_path, mirrors, pause=0.5)
    assert waits == [0.5, 1.0, 2.0]


def test_corrupt_files_are_replaced_and_changed_ones_kept(server, mirrors, tmp_path):
    place = get(tmp_path, mirrors)
    (place / IMAGES).write_bytes(b"\x1f\x8bbroken")
    get(tmp_path, mirrors)
    check_clean(tmp_path)
    own = gzip.compress(idx_bytes(ARRAYS[0] ^ np.uint8(1)))
    (place / IMAGES).write_bytes(own)
    with pytest.raises(DataError, match="would be overwritten"):
        get(tmp_path, mirrors)
    assert (place / IMAGES).read_bytes() == own


def test_one_download_at_a_time(server, mirrors, tmp_path):
    pytest.importorskip("fcntl")
    seen: list[Any] = []

    def second(*_):
        if not seen:
            with pytest.raises(DownloadError, match="another process"):
                get(tmp_path, mirrors)
            seen.append(True)

    get(tmp_path, mirrors, progress=second)
    assert seen
    check_clean(tmp_path)


def test_an_interrupted_download_keeps_what_it_has(server, mirrors, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        get(tmp_path, mirrors, progress=interrupt)
    assert [part.stat().st_size for part in tmp_path.rglob("*.part")] == [len(server.files[f"/a/{IMAGES}"])]
    get(tmp_path, mirrors)
    check_clean(tmp_path)


def test_a_full_disk_is_not_a_mirrors_fault(server, mirrors, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download.os, "fsync", full)
    with pytest.raises(DownloadError, match=r"cannot write .*No space left on device"):
        get(tmp_path, mirrors)
    assert all(path.startswith("/a/") for path, _ in server.seen)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DownloadError, match="cannot write"):
        fetch("mnist", tmp_path / "file", ["http://127.0.0.1:1/"])


def test_the_users_cache_is_the_default(server, mirrors, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    assert get(None, mirrors) == tmp_path / "fulcrum" / "mnist"


def test_wrong_requests_are_refused(tmp_path):
    with pytest.raises(DataError, match="did you mean 'cifar10'"):
        fetch("cifar-10", tmp_path)
    with pytest.raises(DataError, match="nothing to fetch"):
        fetch("digits", tmp_path)
    for wrong in (["file:///etc/"], ["ftp://x/"], []):
        with pytest.raises(ConfigError, match="http"):
            fetch("mnist", tmp_path, wrong)


def test_public_entries_have_several_mirrors_and_full_checksums():
    lengths = {"md5": 32, "sha256": 64}
    for known in registry.PUBLIC_DATASETS.values():
        assert len(set(known.mirrors)) >= 2
        digests = [file.digest for file in known.files] + ([known.archive.digest] if known.archive else [])
        for digest in digests:
            algorithm, value = digest.split(":")
            assert len(bytes.fromhex(value)) * 2 == lengths[algorithm]
        assert len(set(digests)) == len(digests)


# --- the archive ------------------------------------------------------------------------------

PREFIX = "cifar-10-batches-py"
BATCHES = {file.name: file.name.encode() * 50 for file in registry.CIFAR10.files}


def tar_bytes(members, kinds=None):
    """A tar.gz of (name, content) pairs; kinds: name -> tar type, for links."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.type = (kinds or {}).get(name, tarfile.DIRTYPE if content is None else tarfile.REGTYPE)
            info.size = len(content or b"") if info.type == tarfile.REGTYPE else 0
            info.linkname = "/etc/passwd"
            tar.addfile(info, io.BytesIO(content or b""))
    return out.getvalue()


GOOD = [(PREFIX, None), (f"{PREFIX}/readme.html", b"hi"), (f"{PREFIX}/batches.meta", b"meta")]
GOOD += [(f"{PREFIX}/{name}", content) for name, content in BATCHES.items()]


@pytest.fixture
def cifar(server, monkeypatch):
    """A tiny cifar10 whose batches are not pickles: only the transport is tested here."""
    data = tar_bytes(GOOD)
    files = tuple(
        dataclasses.replace(file, digest=f"md5:{hashlib.md5(BATCHES[file.name]).hexdigest()}")
        for file in registry.CIFAR10.files
    )
    assert registry.CIFAR10.archive is not None
    packed = dataclasses.replace(
        registry.CIFAR10.archive, digest=f"md5:{hashlib.md5(data).hexdigest()}", download=len(data)
    )
    entry = dataclasses.replace(
        registry.CIFAR10, files=files, archive=packed, read=lambda content, shape, path: (np.frombuffer(content, "u1"),)
    )
    monkeypatch.setitem(registry.PUBLIC_DATASETS, "cifar10", entry)
    for mirror in "ab":
        server.files[f"/{mirror}/cifar-10-python.tar.gz"] = data
    return entry


def test_the_archive_is_fetched_and_unpacked(server, cifar, tmp_path):
    calls = []
    server.moods["/a/cifar-10-python.tar.gz"] = ["break", "ok"]
    place = fetch("cifar10", tmp_path, [server.url("a")], progress=lambda *call: calls.append(call), pause=0.0)
    assert place == tmp_path / PREFIX
    assert {path.name for path in place.iterdir()} == {*BATCHES, ".fetch.lock"}
    assert all((place / name).read_bytes() == content for name, content in BATCHES.items())
    assert calls[-1] == (cifar.archive.download,) * 2
    server.seen.clear()
    fetch("cifar10", tmp_path, [server.url("a")])
    assert server.seen == []
    (place / "test_batch").unlink()
    fetch("cifar10", tmp_path, [server.url("a")])
    assert (place / "test_batch").read_bytes() == BATCHES["test_batch"]


def test_a_lying_archive_is_never_unpacked(server, cifar, tmp_path):
    server.files["/a/cifar-10-python.tar.gz"] = tar_bytes([*GOOD, ("../evil", b"x")])
    fetch("cifar10", tmp_path, [server.url("a"), server.url("b")], pause=0.0)
    assert not (tmp_path / "evil").exists()
    with pytest.raises(DownloadError, match="checksum"):
        fetch("cifar10", tmp_path / "other", [server.url("a")], pause=0.0)


def unpack(tmp_path, cifar, data):
    (tmp_path / "in.tar.gz").write_bytes(data)
    (tmp_path / "out").mkdir()
    archive.unpack_archive(tmp_path / "in.tar.gz", cifar.archive, cifar.files, set(BATCHES), tmp_path / "out")


def test_a_good_archive_is_unpacked(tmp_path, cifar):
    unpack(tmp_path, cifar, tar_bytes(GOOD))
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(BATCHES)


@pytest.mark.parametrize(
    ("members", "kinds", "words"),
    [
        ([*GOOD, ("../evil", b"x")], {}, "'../evil'"),
        ([*GOOD, ("/tmp/evil", b"x")], {}, "'/tmp/evil'"),
        ([*GOOD, (f"{PREFIX}/../../evil", b"x")], {}, "evil"),
        ([*GOOD, (f"{PREFIX}/unexpected", b"x")], {}, "unexpected"),
        ([*GOOD, GOOD[-1]], {}, "test_batch', which does not belong there"),
        (GOOD, {f"{PREFIX}/test_batch": tarfile.SYMTYPE}, "test_batch"),
        (GOOD, {f"{PREFIX}/test_batch": tarfile.LNKTYPE}, "test_batch"),
        (GOOD, {f"{PREFIX}/readme.html": tarfile.SYMTYPE}, "readme"),
        (GOOD, {f"{PREFIX}/data_batch_1": tarfile.FIFOTYPE}, "data_batch_1"),
        ([*GOOD[:-1], (f"{PREFIX}/test_batch", b"other")], {}, "wrong checksum"),
        (GOOD[:-1], {}, "lacks test_batch"),
        ([], {}, "lacks"),
    ],
)
def test_a_hostile_archive_writes_nothing(tmp_path, cifar, members, kinds, words):
    with pytest.raises(DownloadError, match=words):
        unpack(tmp_path, cifar, tar_bytes(members, kinds))
    assert list((tmp_path / "out").iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"in.tar.gz", "out"}


def test_a_huge_member_is_not_read(tmp_path, cifar, monkeypatch):
    monkeypatch.setattr(archive, "MAX_MEMBER_BYTES", 100)
    with pytest.raises(DownloadError, match="far too many"):
        unpack(tmp_path, cifar, tar_bytes(GOOD))


@pytest.mark.parametrize(
    "spoil", [lambda data: data[:200], lambda data: b"junk", lambda data: data[:100] + bytes(40) + data[140:]]
)
def test_a_damaged_archive_is_a_download_error(tmp_path, cifar, spoil):
    with pytest.raises(DownloadError, match=r"cannot be unpacked|lacks"):
        unpack(tmp_path, cifar, spoil(tar_bytes(GOOD)))
    assert list((tmp_path / "out").iterdir()) == []
