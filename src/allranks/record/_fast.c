/* The hot path of the recorder in C: writes rows, notes their end, finds stacks. Plain CPython API, no torch.
 *
 * Optional: `writer.py` and `stack.py` do the same in Python, a few microseconds slower, and are used when this
 * module was not built. Both write the same bytes; tests/record runs the same tests over both.
 *
 * Ring   begin(...) fills a row in ascending order, `begin` first and `end` last, with a compiler barrier and a
 *        release fence in between, so that a reader in another process never takes a half-written row for whole.
 * Stacks capture(frame) looks a stack up by its code objects and instructions.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { HEADER_BYTES = 4096, ROW_BYTES = 136 };
enum { SCHEDULED = 0, STARTED = 1, COMPLETED = 2 };
enum { RETIRED = 8 };

typedef struct {
    uint64_t begin;
    int64_t created_ns, started_ns, completed_ns, seq, p2p_seq, op_id, step, in_numel, out_numel, timeout_ms;
    uint32_t group, op, shapes, stack, label, thread;
    int32_t peer, root;
    uint16_t reduce_op;
    uint8_t state, pad;
    uint16_t flags, pad2;
    uint64_t end;
} Row;

_Static_assert(sizeof(Row) == ROW_BYTES, "the row of model/trace.py");

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int rings; /* made so far: a forked child that records makes its own, and asks again who it is */
static _Thread_local uint32_t thread_id;
static _Thread_local int thread_asked;

static uint32_t native_thread(void) {
    if (thread_asked != rings) {
        thread_asked = rings;
        thread_id = (uint32_t)syscall(SYS_gettid);
    }
    return thread_id;
}

/* ---- Ring ---------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    uint64_t capacity, next, done;
    long long step;
    unsigned long label;
    int next_field, calls_field, last_field, done_field; /* indices of eight-byte header fields */
} Ring;

static int Ring_init(Ring *self, PyObject *args, PyObject *kwargs) {
    PyObject *memory;
    unsigned long long capacity;
    if (!PyArg_ParseTuple(args, "OKiiii", &memory, &capacity, &self->next_field, &self->calls_field,
                          &self->last_field, &self->done_field))
        return -1;
    if (self->view.obj) {
        PyErr_SetString(PyExc_ValueError, "already open");
        return -1;
    }
    if (PyObject_GetBuffer(memory, &self->view, PyBUF_WRITABLE) < 0)
        return -1;
    int biggest = HEADER_BYTES / 8;
    if (capacity == 0 || (uint64_t)self->view.len < HEADER_BYTES + capacity * ROW_BYTES ||
        self->next_field >= biggest || self->calls_field >= biggest || self->last_field >= biggest ||
        self->done_field >= biggest || self->next_field < 0 || self->calls_field < 0 || self->last_field < 0 ||
        self->done_field < 0) {
        PyBuffer_Release(&self->view);
        PyErr_SetString(PyExc_ValueError, "the memory is too small for this ring");
        return -1;
    }
    rings++;
    self->capacity = capacity;
    self->next = self->done = 0;
    self->step = -1;
    self->label = 0;
    return 0;
}

static void Ring_dealloc(Ring *self) {
    if (self->view.obj)
        PyBuffer_Release(&self->view);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static Row *row_of(Ring *self, uint64_t begin) {
    return (Row *)((char *)self->view.buf + HEADER_BYTES + ((begin - 1) % self->capacity) * ROW_BYTES);
}

static void set_field(Ring *self, int index, int64_t value) {
    ((volatile int64_t *)self->view.buf)[index] = value;
}

/* begin(group, op, shapes, stack, seq, p2p_seq, op_id, timeout_ms, reduce_op, root, peer, flags) -> begin
 * shapes is the tuple (id, elements in, elements out). */
static PyObject *Ring_begin(Ring *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 12 || !PyTuple_Check(args[2]) || PyTuple_GET_SIZE(args[2]) != 3) {
        PyErr_SetString(PyExc_TypeError, "begin takes 12 arguments, the third a tuple of 3");
        return NULL;
    }
    if (!self->view.obj) {
        PyErr_SetString(PyExc_ValueError, "the ring is closed");
        return NULL;
    }
    long long value[12];
    for (int i = 0; i < 12; i++)
        value[i] = i == 2 ? 0 : PyLong_AsLongLong(args[i]);
    long long shapes = PyLong_AsLongLong(PyTuple_GET_ITEM(args[2], 0));
    long long in_numel = PyLong_AsLongLong(PyTuple_GET_ITEM(args[2], 1));
    long long out_numel = PyLong_AsLongLong(PyTuple_GET_ITEM(args[2], 2));
    if (PyErr_Occurred())
        return NULL;
    uint64_t begin = ++self->next;
    volatile Row *row = row_of(self, begin);
    int64_t now = now_ns();
    row->begin = begin;
    atomic_thread_fence(memory_order_release);
    row->created_ns = now;
    row->started_ns = 0;
    row->completed_ns = 0;
    row->seq = value[4];
    row->p2p_seq = value[5];
    row->op_id = value[6];
    row->step = self->step;
    row->in_numel = in_numel;
    row->out_numel = out_numel;
    row->timeout_ms = value[7];
    row->group = (uint32_t)value[0];
    row->op = (uint32_t)value[1];
    row->shapes = (uint32_t)shapes;
    row->stack = (uint32_t)value[3];
    row->label = (uint32_t)self->label;
    row->thread = native_thread();
    row->peer = (int32_t)value[10];
    row->root = (int32_t)value[9];
    row->reduce_op = (uint16_t)value[8];
    row->state = SCHEDULED;
    row->pad = 0;
    row->flags = (uint16_t)value[11];
    row->pad2 = 0;
    atomic_thread_fence(memory_order_release);
    row->end = begin;
    set_field(self, self->next_field, (int64_t)begin);
    set_field(self, self->calls_field, (int64_t)begin);
    set_field(self, self->last_field, now);
    return PyLong_FromUnsignedLongLong(begin);
}

static int token_of(PyObject *argument, Ring *self, uint64_t *begin) {
    *begin = PyLong_AsUnsignedLongLong(argument);
    if (*begin == (uint64_t)-1 && PyErr_Occurred())
        return -1;
    if (*begin == 0 || !self->view.obj) {
        PyErr_SetString(PyExc_ValueError, "no such record");
        return -1;
    }
    return 0;
}

/* started(begin): the library has taken the call. */
static PyObject *Ring_started(Ring *self, PyObject *argument) {
    uint64_t begin;
    if (token_of(argument, self, &begin) < 0)
        return NULL;
    volatile Row *row = row_of(self, begin);
    if (row->begin == begin) {
        row->started_ns = now_ns();
        row->state = STARTED;
    }
    Py_RETURN_NONE;
}

static PyObject *end_row(Ring *self, PyObject *const *args, Py_ssize_t count, int counts) {
    uint64_t begin;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "a number and a state are needed");
        return NULL;
    }
    if (token_of(args[0], self, &begin) < 0)
        return NULL;
    long state = PyLong_AsLong(args[1]);
    if (state == -1 && PyErr_Occurred())
        return NULL;
    volatile Row *row = row_of(self, begin);
    if (row->begin == begin) {
        row->completed_ns = now_ns();
        atomic_thread_fence(memory_order_release);
        row->flags = (uint16_t)(row->flags | RETIRED);
        row->state = (uint8_t)state;
    }
    if (counts && state == COMPLETED)
        set_field(self, self->done_field, (int64_t)++self->done);
    Py_RETURN_NONE;
}

/* finish(begin, state): the call is over; its row is left alone when the ring has given the slot away. */
static PyObject *Ring_finish(Ring *self, PyObject *const *args, Py_ssize_t count) {
    return end_row(self, args, count, 1);
}

/* finish_part(begin, state): the same for a call inside a coalesced group, which is not counted by itself. */
static PyObject *Ring_finish_part(Ring *self, PyObject *const *args, Py_ssize_t count) {
    return end_row(self, args, count, 0);
}

static PyObject *Ring_set_step(Ring *self, PyObject *args) {
    if (!PyArg_ParseTuple(args, "Lk", &self->step, &self->label))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Ring_release(Ring *self, PyObject *unused) {
    if (self->view.obj)
        PyBuffer_Release(&self->view);
    Py_RETURN_NONE;
}

static PyMethodDef Ring_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))Ring_begin, METH_FASTCALL, "Writes the row of a call; returns its number."},
    {"started", (PyCFunction)Ring_started, METH_O, "The library has taken the call."},
    {"finish", (PyCFunction)(void (*)(void))Ring_finish, METH_FASTCALL, "The call is over, in this state."},
    {"finish_part", (PyCFunction)(void (*)(void))Ring_finish_part, METH_FASTCALL, "A part is over, in this state."},
    {"set_step", (PyCFunction)Ring_set_step, METH_VARARGS, "The step and label of the calls from now on."},
    {"release", (PyCFunction)Ring_release, METH_NOARGS, "Lets go of the memory."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot Ring_slots[] = {
    {Py_tp_init, Ring_init},
    {Py_tp_dealloc, Ring_dealloc},
    {Py_tp_methods, Ring_methods},
    {Py_tp_doc, "Rows of a black box."},
    {0, NULL},
};

static PyType_Spec Ring_spec = {"allranks.record._fast.Ring", sizeof(Ring), 0, Py_TPFLAGS_DEFAULT, Ring_slots};

/* ---- Stacks -------------------------------------------------------------------------------------------------- */

enum { MAX_DEPTH = 64, MAX_WALK = 96, LIBRARY_FRAMES = 3 };
enum { TABLE = 1 << 14 }; /* code objects remembered; a power of two, never more than half full */

typedef struct {
    PyObject *code; /* owned: its address is the key */
    int kind;
} Known;

typedef struct {
    PyObject_HEAD
    PyObject *classify; /* called with a code object, returns its kind */
    PyObject *stacks;   /* bytes of (code, instruction) pairs -> id */
    int depth;
    int used;
    Known *table;
} Stacks;

static int Stacks_init(Stacks *self, PyObject *args, PyObject *kwargs) {
    PyObject *classify;
    int depth;
    if (!PyArg_ParseTuple(args, "Oi", &classify, &depth))
        return -1;
    if (self->table) {
        PyErr_SetString(PyExc_ValueError, "already open");
        return -1;
    }
    self->table = PyMem_Calloc(TABLE, sizeof(Known));
    self->stacks = PyDict_New();
    if (!self->table || !self->stacks) {
        PyErr_NoMemory();
        return -1;
    }
    self->classify = Py_NewRef(classify);
    self->depth = depth < MAX_DEPTH ? depth : MAX_DEPTH;
    return 0;
}

static void Stacks_dealloc(Stacks *self) {
    if (self->table)
        for (int i = 0; i < TABLE; i++)
            Py_XDECREF(self->table[i].code);
    PyMem_Free(self->table);
    Py_XDECREF(self->classify);
    Py_XDECREF(self->stacks);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* The kind of a code object; asks Python once. A full table leaves out what is new (kind 0). */
static int kind_of(Stacks *self, PyObject *code) {
    uintptr_t slot = ((uintptr_t)code >> 4) * 0x9E3779B97F4A7C15u >> 50;
    while (self->table[slot].code) {
        if (self->table[slot].code == code)
            return self->table[slot].kind;
        slot = (slot + 1) & (TABLE - 1);
    }
    if (self->used >= TABLE / 2)
        return 0;
    PyObject *answer = PyObject_CallOneArg(self->classify, code);
    if (!answer)
        return -1;
    int kind = (int)PyLong_AsLong(answer);
    Py_DECREF(answer);
    if (kind < 0)
        return -1;
    slot = ((uintptr_t)code >> 4) * 0x9E3779B97F4A7C15u >> 50; /* Python ran: another thread may have filled it */
    while (self->table[slot].code) {
        if (self->table[slot].code == code)
            return kind;
        slot = (slot + 1) & (TABLE - 1);
    }
    self->table[slot].code = Py_NewRef(code);
    self->table[slot].kind = kind;
    self->used++;
    return kind;
}

/* The key of the stack that starts at frame, as bytes. */
static PyObject *key_of(Stacks *self, PyObject *start) {
    uint64_t key[2 * MAX_DEPTH];
    int left = self->depth, library = LIBRARY_FRAMES, walked = MAX_WALK, size = 0;
    PyFrameObject *frame = (PyFrameObject *)Py_NewRef(start);
    while (frame && left && walked--) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        int kind = kind_of(self, (PyObject *)code);
        if (kind < 0) {
            Py_DECREF(code);
            Py_DECREF(frame);
            return NULL;
        }
        if (kind == 2 || (kind == 1 && library)) {
            library -= kind == 1;
            left--;
            key[size++] = (uint64_t)(uintptr_t)code;
            key[size++] = (uint64_t)PyFrame_GetLasti(frame);
        }
        Py_DECREF(code);
        PyFrameObject *back = PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    Py_XDECREF(frame);
    return PyBytes_FromStringAndSize((char *)key, size * (Py_ssize_t)sizeof(uint64_t));
}

/* capture(frame) -> id, or -1 when this stack is new. */
static PyObject *Stacks_capture(Stacks *self, PyObject *frame) {
    if (!PyFrame_Check(frame))
        return PyLong_FromLong(0);
    PyObject *key = key_of(self, frame);
    if (!key)
        return NULL;
    PyObject *found = PyDict_GetItemWithError(self->stacks, key);
    Py_DECREF(key);
    if (found)
        return Py_NewRef(found);
    return PyErr_Occurred() ? NULL : PyLong_FromLong(-1);
}

/* remember(frame, id): the stack that starts here has this id. */
static PyObject *Stacks_remember(Stacks *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyFrame_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "remember takes a frame and an id");
        return NULL;
    }
    PyObject *key = key_of(self, args[0]);
    if (!key)
        return NULL;
    int failed = PyDict_SetItem(self->stacks, key, args[1]);
    Py_DECREF(key);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef Stacks_methods[] = {
    {"capture", (PyCFunction)Stacks_capture, METH_O, "The id of the stack at this frame; -1 when it is new."},
    {"remember", (PyCFunction)(void (*)(void))Stacks_remember, METH_FASTCALL, "Gives a stack its id."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot Stacks_slots[] = {
    {Py_tp_init, Stacks_init},
    {Py_tp_dealloc, Stacks_dealloc},
    {Py_tp_methods, Stacks_methods},
    {Py_tp_doc, "Stacks as small numbers."},
    {0, NULL},
};

static PyType_Spec Stacks_spec = {"allranks.record._fast.Stacks", sizeof(Stacks), 0, Py_TPFLAGS_DEFAULT, Stacks_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", "The hot path of the recorder.", -1, NULL};

PyMODINIT_FUNC PyInit__fast(void) {
    PyObject *made = PyModule_Create(&module);
    PyObject *ring = PyType_FromSpec(&Ring_spec), *stacks = PyType_FromSpec(&Stacks_spec);
    if (!made || !ring || !stacks || PyModule_AddObject(made, "Ring", ring) < 0 ||
        PyModule_AddObject(made, "Stacks", stacks) < 0)
        return NULL;
    return made;
}
