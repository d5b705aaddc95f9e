"""Stand for a process of a fork server in a shell. Usage: python -I -S fork_client.py SOCKET WORD...

git and shell scripts start a process for each file, so this file imports only modules that are compiled into Python:
`json`, `socket` and `struct` take 7 of 17 ms.
"""

import _socket
import array
import marshal
import os
import sys

NUMBER_BYTES = 8


def main() -> None:
    """Request the process, and end with its exit status or signal."""
    request = {"words": sys.argv[2:], "cwd": os.getcwd(), "environment": dict(os.environ), "session": "same"}
    body = marshal.dumps(request)
    connection = _socket.socket(_socket.AF_UNIX)
    connection.connect(sys.argv[1])
    streams = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
    connection.sendmsg([len(body).to_bytes(NUMBER_BYTES, "little")], [streams])
    connection.sendall(body)
    connection.recv(NUMBER_BYTES, _socket.MSG_WAITALL)
    status = int.from_bytes(connection.recv(NUMBER_BYTES, _socket.MSG_WAITALL), "little", signed=True)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        import signal

        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
