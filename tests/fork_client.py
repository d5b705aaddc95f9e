"""Stand for a process of a fork server in a shell. Usage: python -I -S fork_client.py SOCKET WORD...

Imports little, because git and shell scripts start a process for each file.
"""

import json
import os
import signal
import socket
import struct
import sys

NUMBER = struct.Struct("<q")


def main() -> None:
    """Request the process, and end with its exit status or signal."""
    request = {"words": sys.argv[2:], "cwd": os.getcwd(), "environment": dict(os.environ), "session": "same"}
    body = json.dumps(request).encode()
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(sys.argv[1])
    socket.send_fds(connection, [NUMBER.pack(len(body))], [0, 1, 2])
    connection.sendall(body)
    connection.recv(NUMBER.size, socket.MSG_WAITALL)
    (status,) = NUMBER.unpack(connection.recv(NUMBER.size, socket.MSG_WAITALL))
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
