"""Runs inside the sandbox's process, as a script of its own: isolate, then become the interpreter.

Not imported by the package. Arguments: one JSON object with the limits and the folder to build the new
root in, and two file descriptors. What could be set up is written as one JSON line to ``report`` before
the program starts; the parent decides whether that is enough and otherwise kills the process, which
waits for one byte on ``go`` until then.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import sys
from pathlib import Path
from typing import Any

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _REMOUNT, _BIND, _REC, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_DETACH = 2
_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_PIVOT = {"x86_64": 155, "aarch64": 41}
_SET_PDEATHSIG, _SET_NO_NEW_PRIVS = 1, 38
_OWN_UID = 63_217  # a user no one else is, when the caller is root
_INNER = "inner"  # where the new root is shown once more
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: Any) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    _call("mount", *texts[:3], flags, texts[3])


def _bind_read_only(path: Path, root: str) -> None:
    """Show a path of the machine under the new root, read-only."""
    target = f"{root}{path}"
    place = Path(target)
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        if not place.is_symlink():
            place.symlink_to(path.readlink())
        return
    if path.is_dir():
        place.mkdir(exist_ok=True)
    else:
        place.touch()
    _mount(str(path), target, None, _BIND | _REC)
    # struct mount_attr: set, clear, propagation, userns
    wanted = (ctypes.c_uint64 * 4)(_RDONLY | _NOSUID, 0, 0, 0)
    done = _libc.syscall(
        ctypes.c_long(_SETATTR), ctypes.c_int(_AT_FDCWD), ctypes.c_char_p(target.encode()),
        ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(wanted), ctypes.c_size_t(32),
    )  # fmt: skip
    if done != 0:
        _mount(None, target, None, _REMOUNT | _BIND | _RDONLY | _NOSUID)


def _new_root(root: str, python: str) -> None:
    """A read-only root with the interpreter and the system libraries, /tmp in memory, and /proc."""
    _mount(None, "/", None, _REC | _PRIVATE)
    _mount("tmpfs", root, "tmpfs", _NOSUID | _NODEV, "size=1m,mode=755")
    shown = ["/usr/lib", "/usr/lib64", "/usr/local/lib", "/lib", "/lib64", "/etc/ld.so.cache"]
    shown += [sys.base_prefix, sys.base_exec_prefix, str(Path(python).resolve().parent)]
    done: list[Path] = []
    for path in map(Path, shown):
        inside = any(path.is_relative_to(one) for one in done)
        if (path.is_symlink() or path.exists()) and path != Path("/") and not inside:
            _bind_read_only(path, root)
            if not path.is_symlink():
                done.append(path)
    for folder in ("tmp", "proc", "dev", _INNER):
        Path(root, folder).mkdir(exist_ok=True)
    _mount("tmpfs", root + "/tmp", "tmpfs", _NOSUID | _NODEV, "size=8m,mode=1777")
    Path(root, "dev", "null").touch()
    _mount("/dev/null", root + "/dev/null", None, _BIND)
    _mount(None, root, None, _REMOUNT | _RDONLY | _NOSUID | _NODEV | _BIND)
    os.chdir(root)
    _pivot()


def _pivot() -> None:
    number = _PIVOT.get(platform.machine())
    if number is None:
        raise OSError(0, "no pivot_root on this machine")
    if _libc.syscall(ctypes.c_long(number), b".", b".") != 0:
        raise OSError(ctypes.get_errno(), "pivot_root failed")
    _call("umount2", b".", _DETACH)


def _forbid_user_namespaces() -> None:
    """For a caller who is root: the kernel gives a process in a chroot no user namespace.

    A caller who is not has one already, whose own limit `main` sets to none; root's would be the
    machine's. In a user namespace of its own a program could mount memory without limit.
    """
    _mount("/", f"/{_INNER}", None, _BIND | _REC)
    os.chroot(f"/{_INNER}")


def _isolate(options: dict[str, Any], report: dict[str, Any]) -> bool:
    """Namespaces, root and user; what worked goes into ``report``."""
    is_root = os.geteuid() == 0
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    flags = _NEWNS | _NEWNET | _NEWIPC | _NEWUTS | _NEWPID | _NEWCGROUP
    _call("unshare", flags | (0 if is_root else _NEWUSER))
    if not is_root:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"1000 {outer_uid} 1"),
            ("gid_map", f"1000 {outer_gid} 1"),
        ):
            Path(f"/proc/self/{name}").write_text(text)
    report["network"] = "none: a network namespace without interfaces"
    _new_root(options["root"], options["python"])
    if is_root:
        _forbid_user_namespaces()
    os.chdir("/tmp")
    report["root"] = "read-only: the interpreter and system libraries; 8 MiB of memory at /tmp"
    report["user"] = "user namespace" if not is_root else f"uid {_OWN_UID}"
    return is_root


def _limit(options: dict[str, Any]) -> None:
    memory, cpu_s = options["memory_bytes"], options["cpu_s"]
    for name, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_FSIZE, options["output_bytes"]),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(name, (value, value))


def main() -> None:
    options = json.loads(sys.argv[1])
    report: dict[str, Any] = {
        "network": None,
        "root": None,
        "user": None,
        "limits": None,
        "error": None,
    }
    is_root = False
    try:
        is_root = _isolate(options, report)
    except OSError as error:
        report["error"] = str(error)
    pid = os.fork()  # the first process of the new process namespace
    if pid:
        os.close(options["report"])
        os.close(options["go"])
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            os._exit(128 + os.WTERMSIG(status))
        os._exit(os.WEXITSTATUS(status))
    _libc.prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    try:
        if report["root"]:
            _mount("proc", "/proc", "proc", _NOSUID | _NODEV | 8)
            report["processes"] = "a process namespace"
            if not is_root:
                Path("/proc/sys/user/max_user_namespaces").write_text("0")
    except OSError:
        report["processes"] = report.get("processes") or "a process namespace without /proc"
    if is_root and report["root"]:
        os.setgroups([])
        os.setresgid(_OWN_UID, _OWN_UID, _OWN_UID)
        os.setresuid(_OWN_UID, _OWN_UID, _OWN_UID)
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
    _libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _limit(options)
    report["limits"] = {
        name: options[name] for name in ("memory_bytes", "cpu_s", "wall_s", "output_bytes")
    }
    os.write(options["report"], json.dumps(report).encode() + b"\n")
    os.close(options["report"])
    if os.read(options["go"], 1) != b"g":
        os._exit(1)
    os.close(options["go"])
    python = options["python"]
    os.execve(python, [python, "-I", "-S", "-B", "-"], {"LANG": "C.UTF-8"})


if __name__ == "__main__":
    main()
