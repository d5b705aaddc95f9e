"""Rename the names of Python 2 in pickles of protocols 0 to 2, as Python 3 and torch do when they load a pickle.

Every name in a renamed module is renamed: `UserDict.OrderedDict` becomes `collections.OrderedDict`.
"""

from __future__ import annotations

from functools import lru_cache

#: Modules in Python's `_compat_pickle`, which is imported only if a pickle names one of these modules.
_MODULE_NAMES = (
    "BaseHTTPServer CGIHTTPServer ConfigParser Cookie Dialog DocXMLRPCServer FileDialog HTMLParser Queue ScrolledText "
    "SimpleDialog SimpleHTTPServer SimpleXMLRPCServer SocketServer StringIO Tix Tkconstants Tkdnd Tkinter UserDict "
    "UserList UserString __builtin__ _abcoll _elementtree _multiprocessing _socket _winreg anydbm cPickle cStringIO "
    "commands cookielib copy_reg dbhash dbm dumbdbm dummy_thread exceptions gdbm htmlentitydefs httplib itertools "
    "markupbase multiprocessing multiprocessing.forking multiprocessing.process repr robotparser socket "
    "test.test_support thread tkColorChooser tkCommonDialog tkFileDialog tkFont tkMessageBox tkSimpleDialog ttk "
    "urllib urllib2 urlparse whichdb xmlrpclib"
)
MODULES = frozenset(_MODULE_NAMES.split())


@lru_cache(maxsize=4096)
def rename_python2(module: str, name: str) -> tuple[str, str]:
    """Return the Python 3 name of a Python 2 name: `commands.getoutput` becomes `subprocess.getoutput`.

    Python renames only in pickles of protocols 0 to 2; in other pickles, a name that only Python 2 has is not found.
    """
    if module not in MODULES:
        return module, name
    from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING

    return NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
