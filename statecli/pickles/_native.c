/* The tensors of a state_dict as torch.save pickles them, one after the other: what `machine.py` does for each, without
   its loop over opcodes.

   A tensor is read only if its bytes are exactly those of the template below. At the first other byte the machine goes
   on from the last whole tensor, so a pickle means the same with and without this file. Opcodes are prefix codes: bytes
   that follow the template can be read in no other way. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

/* The bytes not yet read. */
typedef struct {
    const unsigned char *at, *end;
} Cursor;

/* Bytes of the file, not copied. */
typedef struct {
    const char *start;
    Py_ssize_t length;
} Part;

/* One entry of the state_dict. Fields that end in `_entry` are entries of the memo. */
typedef struct {
    Part name, key, shape, strides;
    uint32_t function_entry, tag_entry, kind_entry, location_entry, hooks_entry;
    int64_t elements, offset;
    int requires_grad;
} Record;

/* What all tensors have in common, borrowed. */
typedef struct {
    PyObject *stack, *memo, *persistent, *shapes, *call, *storage, *function, *hooks;
} Machine;

enum { MAX_KEY_DIGITS = 20, MIN_LONG_SHAPE = 4, MAX_LONG_SHAPE = 16 };

/* The bytes left; lengths of the file are compared as unsigned, because Py_ssize_t may have 32 bits. */
static size_t left(const Cursor *cursor) {
    return (size_t)(cursor->end - cursor->at);
}

static int take(Cursor *cursor, unsigned char byte) {
    if (cursor->at == cursor->end || *cursor->at != byte)
        return 0;
    cursor->at++;
    return 1;
}

static int take_u32(Cursor *cursor, uint32_t *number) {
    if (left(cursor) < 4)
        return 0;
    const unsigned char *at = cursor->at;
    *number = at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
    cursor->at += 4;
    return 1;
}

/* BINGET or LONG_BINGET of an entry before `next`. */
static int take_get(Cursor *cursor, Py_ssize_t next, uint32_t *entry) {
    if (take(cursor, 'h')) {
        if (cursor->at == cursor->end)
            return 0;
        *entry = *cursor->at++;
    } else if (!take(cursor, 'j') || !take_u32(cursor, entry))
        return 0;
    return *entry < (size_t)next;
}

/* LONG_BINPUT of the next entry. */
static int take_put(Cursor *cursor, Py_ssize_t *next) {
    uint32_t entry;
    return take(cursor, 'r') && take_u32(cursor, &entry) && entry == (size_t)(*next)++;
}

/* BININT1, BININT2 or BININT. */
static int take_number(Cursor *cursor, int64_t *number) {
    uint32_t bits;
    if (take(cursor, 'K')) {
        if (cursor->at == cursor->end)
            return 0;
        *number = *cursor->at++;
    } else if (take(cursor, 'M')) {
        if (left(cursor) < 2)
            return 0;
        *number = cursor->at[0] | cursor->at[1] << 8;
        cursor->at += 2;
    } else if (take(cursor, 'J') && take_u32(cursor, &bits))
        *number = (int32_t)bits;
    else
        return 0;
    return 1;
}

/* One to three numbers and TUPLE1 to TUPLE3, or a MARK, more numbers and TUPLE. */
static int take_shape(Cursor *cursor, Part *shape) {
    int64_t number;
    int count = 0, is_long;
    shape->start = (const char *)cursor->at;
    is_long = take(cursor, '(');
    while (count < MAX_LONG_SHAPE && take_number(cursor, &number))
        count++;
    if (is_long ? count < MIN_LONG_SHAPE || !take(cursor, 't')
                : count < 1 || count > 3 || !take(cursor, (unsigned char)(0x84 + count)))
        return 0;
    shape->length = (const char *)cursor->at - shape->start;
    return 1;
}

/* The key of a storage: up to 20 digits. */
static int take_key(Cursor *cursor, Part *key) {
    uint32_t length;
    if (!take(cursor, 'X') || !take_u32(cursor, &length) || length < 1 || length > MAX_KEY_DIGITS ||
        left(cursor) < length)
        return 0;
    *key = (Part){(const char *)cursor->at, (Py_ssize_t)length};
    for (; length; length--, cursor->at++)
        if (*cursor->at < '0' || *cursor->at > '9')
            return 0;
    return 1;
}

/* The name of a tensor, in which no scan looks for a pickle: of letters, digits, points, underscores and hyphens. */
static int take_name(Cursor *cursor, Part *name) {
    uint32_t length;
    if (!take(cursor, 'X') || !take_u32(cursor, &length) || left(cursor) < length)
        return 0;
    *name = (Part){(const char *)cursor->at, (Py_ssize_t)length};
    for (; length; length--, cursor->at++) {
        unsigned char byte = *cursor->at, letter = byte | 32;
        if (!((letter >= 'a' && letter <= 'z') || (byte >= '0' && byte <= '9') || byte == '.' || byte == '_' ||
              byte == '-'))
            return 0;
    }
    return 1;
}

/* The name, the function and its arguments, REDUCE: all that torch.save writes for an entry. */
static int take_record(Cursor *cursor, Py_ssize_t next, Record *record) {
    if (!take_name(cursor, &record->name) || !take_put(cursor, &next) ||
        !take_get(cursor, next, &record->function_entry) || !take(cursor, '('))
        return 0;
    Py_ssize_t before = next;
    if (!take(cursor, '(') || !take_get(cursor, before, &record->tag_entry) ||
        !take_get(cursor, before, &record->kind_entry) || !take_key(cursor, &record->key) ||
        !take_put(cursor, &next) || !take_get(cursor, before, &record->location_entry) ||
        !take_number(cursor, &record->elements) || !take(cursor, 't') || !take_put(cursor, &next) ||
        !take(cursor, 'Q') || !take_number(cursor, &record->offset))
        return 0;
    if (take(cursor, ')')) {
        record->shape.length = record->strides.length = 0;
        if (!take(cursor, ')'))
            return 0;
    } else if (!take_shape(cursor, &record->shape) || !take_put(cursor, &next) ||
               !take_shape(cursor, &record->strides) || !take_put(cursor, &next))
        return 0;
    record->requires_grad = take(cursor, 0x88);
    return (record->requires_grad || take(cursor, 0x89)) && take_get(cursor, before, &record->hooks_entry) &&
           take(cursor, ')') && take(cursor, 'R') && take_put(cursor, &next) && take(cursor, 't') &&
           take_put(cursor, &next) && take(cursor, 'R') && take_put(cursor, &next);
}

static PyObject *text_of(Part part) {
    return PyUnicode_DecodeUTF8(part.start, part.length, NULL);
}

/* The storage and its persistent id, which become entries of the memo. */
static PyObject *add_storage(const Machine *m, const Record *record) {
    PyObject *key = text_of(record->key), *elements = PyLong_FromLongLong(record->elements), *pid = NULL;
    PyObject *storage = NULL;
    if (key && elements)
        pid = PyTuple_Pack(5, PyList_GetItem(m->memo, record->tag_entry), PyList_GetItem(m->memo, record->kind_entry),
                           key, PyList_GetItem(m->memo, record->location_entry), elements);
    if (pid && !PyList_Append(m->memo, key) && !PyList_Append(m->memo, pid))
        storage = PyObject_CallFunctionObjArgs(m->storage, pid, NULL);
    Py_XDECREF(key);
    Py_XDECREF(elements);
    Py_XDECREF(pid);
    if (storage && PyList_Append(m->persistent, storage))
        Py_CLEAR(storage);
    return storage;
}

/* Keep a name as an entry of the memo and as a key on the stack. */
static int add_name(const Machine *m, Part part) {
    PyObject *name = text_of(part);
    int is_done = name && !PyList_Append(m->memo, name) && !PyList_Append(m->stack, name);
    Py_XDECREF(name);
    return is_done;
}

/* Size or strides, which become an entry of the memo: the same tuple for the same opcodes. */
static PyObject *add_shape(const Machine *m, Part opcodes, PyObject *empty) {
    if (!opcodes.length)
        return Py_NewRef(empty);
    PyObject *raw = PyBytes_FromStringAndSize(opcodes.start, opcodes.length);
    PyObject *shape = raw ? PyObject_GetItem(m->shapes, raw) : NULL;
    Py_XDECREF(raw);
    if (shape && PyList_Append(m->memo, shape))
        Py_CLEAR(shape);
    return shape;
}

/* Do the operations of a record; 0 after an error. */
static int add_record(const Machine *m, const Record *record, PyObject *empty) {
    PyObject *storage = NULL, *offset = NULL, *shape = NULL, *strides = NULL, *hooks = NULL, *arguments = NULL;
    PyObject *tensor = NULL, *grad = record->requires_grad ? Py_True : Py_False;
    int is_done = add_name(m, record->name) && (storage = add_storage(m, record)) &&
                  (offset = PyLong_FromLongLong(record->offset)) && (shape = add_shape(m, record->shape, empty)) &&
                  (strides = add_shape(m, record->strides, empty)) &&
                  (hooks = PyObject_CallFunctionObjArgs(m->call, m->hooks, empty, NULL)) &&
                  (arguments = PyTuple_Pack(6, storage, offset, shape, strides, grad, hooks)) &&
                  (tensor = PyObject_CallFunctionObjArgs(m->call, m->function, arguments, NULL)) &&
                  !PyList_Append(m->memo, hooks) && !PyList_Append(m->memo, arguments) &&
                  !PyList_Append(m->memo, tensor) && !PyList_Append(m->stack, tensor);
    PyObject *own[] = {storage, offset, shape, strides, hooks, arguments, tensor};
    for (size_t n = 0; n < sizeof own / sizeof *own; n++)
        Py_XDECREF(own[n]);
    return is_done;
}

/* Whether the memo has this object at the entry. */
static int has_entry(PyObject *memo, uint32_t entry, PyObject *object) {
    return entry < (size_t)PyList_Size(memo) && PyList_GetItem(memo, entry) == object;
}

static PyObject *take_records(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *data;
    Py_ssize_t position, end, limit, count = 0, size;
    char *bytes;
    Machine m;
    if (!PyArg_ParseTuple(args, "O!nnnO!O!O!OOOOO", &PyBytes_Type, &data, &position, &end, &limit, &PyList_Type,
                          &m.stack, &PyList_Type, &m.memo, &PyList_Type, &m.persistent, &m.shapes, &m.call, &m.storage,
                          &m.function, &m.hooks) ||
        PyBytes_AsStringAndSize(data, &bytes, &size))
        return NULL;
    if (position < 0 || position > size || end < position)
        return PyErr_Format(PyExc_ValueError, "bytes %zd to %zd are outside the data", position, end);
    const unsigned char *first = (const unsigned char *)bytes;
    Cursor cursor = {first + position, first + (end < size ? end : size)};
    PyObject *empty = PyTuple_New(0);
    while (empty && count < limit && cursor.at < cursor.end) {
        Record record;
        if (!take_record(&cursor, PyList_Size(m.memo), &record) ||
            !has_entry(m.memo, record.function_entry, m.function) || !has_entry(m.memo, record.hooks_entry, m.hooks))
            break;
        if (!add_record(&m, &record, empty))
            Py_CLEAR(empty);
        count++;
        position = cursor.at - first;
    }
    if (!empty)
        return NULL;
    Py_DECREF(empty);
    return Py_BuildValue("nn", position, count);
}

static PyMethodDef METHODS[] = {
    {"take_records", take_records, METH_VARARGS, "See _native.pyi."},
    {NULL, NULL, 0, NULL},
};
static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, "_native", NULL, -1, METHODS, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&MODULE);
    if (module && PyModule_AddIntConstant(module, "VERSION", 1)) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
