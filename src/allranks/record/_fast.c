/* The hot path of the recorder in C: writes rows, notes their end, finds stacks. Plain CPython API, no torch.
 *
 * Optional: `writer.py` and `stack.py` do the same in Python, a few microseconds slower, and are used when this
 * module was not built. Both write the same bytes; tests/record runs the same tests over both.
 *
 * Ring   begin(...) fills a row in ascending order, `begin` first and `end` last, with a compiler barrier and a
 *        release fence in between, so that a reader in another process never takes a half-written row for whole.
 * Stacks capture(frame) looks a stack up by its code objects and instructions.
 * Counters numbers the calls of one process group.
 * AllReduce, Wait  stand in for ProcessGroup.allreduce and Work.wait in their most frequent form, and hand every
 *        other form to the wrapper written in Python. They hold the GIL throughout, except inside torch.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <structmember.h>
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

typedef struct {
    long long group, op, shapes, in_numel, out_numel, stack, seq, p2p_seq, op_id, timeout_ms, reduce_op, root, peer, flags;
} Call;

static uint64_t write_row(Ring *self, const Call *call) {
    uint64_t begin = ++self->next;
    volatile Row *row = row_of(self, begin);
    int64_t now = now_ns();
    row->begin = begin;
    atomic_thread_fence(memory_order_release);
    row->created_ns = now;
    row->started_ns = 0;
    row->completed_ns = 0;
    row->seq = call->seq;
    row->p2p_seq = call->p2p_seq;
    row->op_id = call->op_id;
    row->step = self->step;
    row->in_numel = call->in_numel;
    row->out_numel = call->out_numel;
    row->timeout_ms = call->timeout_ms;
    row->group = (uint32_t)call->group;
    row->op = (uint32_t)call->op;
    row->shapes = (uint32_t)call->shapes;
    row->stack = (uint32_t)call->stack;
    row->label = (uint32_t)self->label;
    row->thread = native_thread();
    row->peer = (int32_t)call->peer;
    row->root = (int32_t)call->root;
    row->reduce_op = (uint16_t)call->reduce_op;
    row->state = SCHEDULED;
    row->pad = 0;
    row->flags = (uint16_t)call->flags;
    row->pad2 = 0;
    atomic_thread_fence(memory_order_release);
    row->end = begin;
    set_field(self, self->next_field, (int64_t)begin);
    set_field(self, self->calls_field, (int64_t)begin);
    set_field(self, self->last_field, now);
    return begin;
}

/* Reads the tuple (id, elements in, elements out); -1 with an exception when it is none. */
static int read_shapes(PyObject *shapes, Call *call) {
    if (!PyTuple_Check(shapes) || PyTuple_GET_SIZE(shapes) != 3) {
        PyErr_SetString(PyExc_TypeError, "shapes are a tuple of 3");
        return -1;
    }
    call->shapes = PyLong_AsLongLong(PyTuple_GET_ITEM(shapes, 0));
    call->in_numel = PyLong_AsLongLong(PyTuple_GET_ITEM(shapes, 1));
    call->out_numel = PyLong_AsLongLong(PyTuple_GET_ITEM(shapes, 2));
    return PyErr_Occurred() ? -1 : 0;
}

/* begin(group, op, shapes, stack, seq, p2p_seq, op_id, timeout_ms, reduce_op, root, peer, flags) -> begin */
static PyObject *Ring_begin(Ring *self, PyObject *const *args, Py_ssize_t count) {
    Call call;
    if (count != 12) {
        PyErr_SetString(PyExc_TypeError, "begin takes 12 arguments");
        return NULL;
    }
    if (!self->view.obj) {
        PyErr_SetString(PyExc_ValueError, "the ring is closed");
        return NULL;
    }
    if (read_shapes(args[2], &call) < 0)
        return NULL;
    call.group = PyLong_AsLongLong(args[0]);
    call.op = PyLong_AsLongLong(args[1]);
    call.stack = PyLong_AsLongLong(args[3]);
    call.seq = PyLong_AsLongLong(args[4]);
    call.p2p_seq = PyLong_AsLongLong(args[5]);
    call.op_id = PyLong_AsLongLong(args[6]);
    call.timeout_ms = PyLong_AsLongLong(args[7]);
    call.reduce_op = PyLong_AsLongLong(args[8]);
    call.root = PyLong_AsLongLong(args[9]);
    call.peer = PyLong_AsLongLong(args[10]);
    call.flags = PyLong_AsLongLong(args[11]);
    if (PyErr_Occurred())
        return NULL;
    return PyLong_FromUnsignedLongLong(write_row(self, &call));
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

static void mark_started(Ring *self, uint64_t begin) {
    volatile Row *row = row_of(self, begin);
    if (row->begin == begin) {
        row->started_ns = now_ns();
        row->state = STARTED;
    }
}

static void mark_finished(Ring *self, uint64_t begin, int state, int counts) {
    volatile Row *row = row_of(self, begin);
    if (row->begin == begin) {
        row->completed_ns = now_ns();
        atomic_thread_fence(memory_order_release);
        row->flags = (uint16_t)(row->flags | RETIRED);
        row->state = (uint8_t)state;
    }
    if (counts && state == COMPLETED)
        set_field(self, self->done_field, (int64_t)++self->done);
}

/* started(begin): the library has taken the call. */
static PyObject *Ring_started(Ring *self, PyObject *argument) {
    uint64_t begin;
    if (token_of(argument, self, &begin) < 0)
        return NULL;
    mark_started(self, begin);
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
    mark_finished(self, begin, (int)state, counts);
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

/* The id of the stack at frame; -1 when it is new, -2 with an exception. */
static long find_stack(Stacks *self, PyObject *frame) {
    PyObject *key = key_of(self, frame);
    if (!key)
        return -2;
    PyObject *found = PyDict_GetItemWithError(self->stacks, key);
    long id = found ? PyLong_AsLong(found) : -1;
    Py_DECREF(key);
    return PyErr_Occurred() ? -2 : id;
}

/* capture(frame) -> id, or -1 when this stack is new. */
static PyObject *Stacks_capture(Stacks *self, PyObject *frame) {
    long id = PyFrame_Check(frame) ? find_stack(self, frame) : 0;
    return id == -2 ? NULL : PyLong_FromLong(id);
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

/* ---- Counters ------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    long long number, seq, p2p_seq, op_id, timeout_ms;
    char blocking;
    PyObject *batch; /* numbers of the open coalesced group, or None */
} Counters;

static int Counters_init(Counters *self, PyObject *args, PyObject *kwargs) {
    int blocking;
    if (!PyArg_ParseTuple(args, "LLp", &self->number, &self->timeout_ms, &blocking))
        return -1;
    self->blocking = (char)blocking;
    self->seq = self->p2p_seq = self->op_id = 0;
    Py_XSETREF(self->batch, Py_NewRef(Py_None));
    return 0;
}

static void Counters_dealloc(Counters *self) {
    Py_XDECREF(self->batch);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *Counters_next_seq(Counters *self, PyObject *unused) { return PyLong_FromLongLong(++self->seq); }
static PyObject *Counters_next_p2p(Counters *self, PyObject *unused) { return PyLong_FromLongLong(++self->p2p_seq); }
static PyObject *Counters_next_op(Counters *self, PyObject *unused) { return PyLong_FromLongLong(++self->op_id); }

static PyMethodDef Counters_methods[] = {
    {"next_seq", (PyCFunction)Counters_next_seq, METH_NOARGS, "The number of the next collective."},
    {"next_p2p", (PyCFunction)Counters_next_p2p, METH_NOARGS, "The number of the next send or recv."},
    {"next_op", (PyCFunction)Counters_next_op, METH_NOARGS, "The number of the next operation."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Counters_members[] = {
    {"number", T_LONGLONG, offsetof(Counters, number), READONLY, "Id of the group in the black box."},
    {"last_seq", T_LONGLONG, offsetof(Counters, seq), READONLY, "Collectives so far."},
    {"timeout_ms", T_LONGLONG, offsetof(Counters, timeout_ms), 0, "Timeout of the group; 0 unknown."},
    {"blocking", T_BOOL, offsetof(Counters, blocking), READONLY, "wait() returns when the call is over."},
    {"batch", T_OBJECT, offsetof(Counters, batch), 0, "Numbers of the open coalesced group, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Counters_slots[] = {
    {Py_tp_init, Counters_init},       {Py_tp_dealloc, Counters_dealloc},
    {Py_tp_methods, Counters_methods}, {Py_tp_members, Counters_members},
    {Py_tp_doc, "Numbers of one process group's calls."}, {0, NULL},
};

static PyType_Spec Counters_spec = {
    "allranks.record._fast.Counters", sizeof(Counters), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, Counters_slots};

/* ---- AllReduce and Wait -------------------------------------------------------------------------------------- */

static PyTypeObject *ring_type, *stacks_type, *counters_type;
static PyObject *str_shape, *str_dtype, *str_reduce_op, *no_parts;

/* Both: `original` is torch's function, `slow` the wrapper in Python, `failed` is told of an error of `original`. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *original, *slow, *failed, *pending, *groups, *shapes, *options_type, *sweep, *no_work;
    Ring *ring;
    Stacks *stacks; /* NULL: no stacks */
    long long op;
    char enabled, direct;
} Method;

static void Method_dealloc(Method *self) {
    Py_XDECREF(self->original);
    Py_XDECREF(self->slow);
    Py_XDECREF(self->failed);
    Py_XDECREF(self->pending);
    Py_XDECREF(self->groups);
    Py_XDECREF(self->shapes);
    Py_XDECREF(self->options_type);
    Py_XDECREF(self->sweep);
    Py_XDECREF(self->no_work);
    Py_XDECREF(self->ring);
    Py_XDECREF(self->stacks);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* Bound to an instance as a function would be. */
static PyObject *Method_get(PyObject *self, PyObject *instance, PyObject *type) {
    if (!instance || instance == Py_None)
        return Py_NewRef(self);
    return PyMethod_New(self, instance);
}

/* Tells `failed(key, error)` of the exception that is set, and sets it again. */
static void tell_failure(Method *self, PyObject *key) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    PyObject *answer = PyObject_CallFunctionObjArgs(self->failed, key, error ? error : Py_None, NULL);
    if (!answer)
        PyErr_Clear();
    Py_XDECREF(answer);
    PyErr_Restore(kind, error, trace);
}

/* The row of a call with one tensor and an options object; 0 with no exception left: use `slow`. */
static uint64_t begin_all_reduce(Method *self, Counters *group, PyObject *tensor, PyObject *options) {
    Call call = {.op = self->op, .root = -1, .peer = -1};
    uint64_t begin = 0;
    PyObject *shape = PyObject_GetAttr(tensor, str_shape), *dtype = PyObject_GetAttr(tensor, str_dtype);
    PyObject *key = shape && dtype ? PyTuple_Pack(2, shape, dtype) : NULL;
    PyObject *known = key ? PyDict_GetItemWithError(self->shapes, key) : NULL;
    PyObject *operation = known ? PyObject_GetAttr(options, str_reduce_op) : NULL;
    Py_hash_t reduce = operation ? PyObject_Hash(operation) : -1;
    if (!known || reduce < 0 || reduce > 8 || read_shapes(known, &call) < 0)
        goto done;
    if (self->stacks) {
        PyFrameObject *frame = PyEval_GetFrame(); /* borrowed: the caller's, as C functions have none */
        call.stack = frame ? find_stack(self->stacks, (PyObject *)frame) : 0;
        if (call.stack <= 0)
            goto done; /* new, or on a thread without Python frames */
    }
    call.reduce_op = reduce + 1;
    call.group = group->number;
    call.timeout_ms = group->timeout_ms;
    call.seq = ++group->seq;
    call.op_id = ++group->op_id;
    begin = write_row(self->ring, &call);
done:
    PyErr_Clear();
    Py_XDECREF(operation);
    Py_XDECREF(key);
    Py_XDECREF(shape);
    Py_XDECREF(dtype);
    return begin;
}

/* Keeps (work, number, group, no parts) under the identity of the work. */
static int keep(Method *self, PyObject *work, PyObject *number, PyObject *group) {
    PyObject *key = PyLong_FromVoidPtr(work);
    PyObject *entry = key ? PyTuple_Pack(4, work, number, group, no_parts) : NULL;
    int failed = !entry || PyDict_SetItem(self->pending, key, entry) < 0;
    Py_XDECREF(key);
    Py_XDECREF(entry);
    return failed;
}

static PyObject *AllReduce_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    if (!self->enabled)
        return PyObject_Vectorcall(self->original, args, flags, names);
    if (!self->direct || names || PyVectorcall_NARGS(flags) != 3 || (PyObject *)Py_TYPE(args[2]) != self->options_type ||
        !PyList_CheckExact(args[1]) || PyList_GET_SIZE(args[1]) != 1 || !self->ring->view.obj)
        return PyObject_Vectorcall(self->slow, args, flags, names);
    PyObject *key = PyLong_FromVoidPtr(args[0]);
    Counters *group = key ? (Counters *)PyDict_GetItemWithError(self->groups, key) : NULL;
    Py_XDECREF(key);
    if (!group || !PyObject_TypeCheck((PyObject *)group, counters_type) || group->batch != Py_None) {
        PyErr_Clear();
        return PyObject_Vectorcall(self->slow, args, flags, names);
    }
    Py_INCREF(group);
    if (PyDict_GET_SIZE(self->pending)) {
        PyObject *swept = PyObject_CallNoArgs(self->sweep);
        if (!swept)
            PyErr_Clear();
        Py_XDECREF(swept);
    }
    PyObject *tensor = Py_NewRef(PyList_GET_ITEM(args[1], 0));
    uint64_t begin = begin_all_reduce(self, group, tensor, args[2]);
    Py_DECREF(tensor);
    PyObject *number = begin ? PyLong_FromUnsignedLongLong(begin) : NULL;
    if (!number) {
        PyErr_Clear();
        Py_DECREF(group);
        return PyObject_Vectorcall(self->slow, args, flags, names);
    }
    PyObject *work = PyObject_Vectorcall(self->original, args, flags, names);
    if (!work)
        tell_failure(self, number);
    else if (work == Py_None) { /* over, or queued on the device: Python knows how to follow it */
        PyObject *answer = PyObject_CallFunctionObjArgs(self->no_work, number, (PyObject *)group, NULL);
        if (!answer)
            PyErr_Clear();
        Py_XDECREF(answer);
    }
    else {
        if (group->blocking)
            mark_started(self->ring, begin);
        if (keep(self, work, number, (PyObject *)group))
            PyErr_Clear();
    }
    Py_DECREF(number);
    Py_DECREF(group);
    return work;
}

static PyObject *Wait_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    if (!self->enabled || PyVectorcall_NARGS(flags) < 1 || !self->ring->view.obj)
        return PyObject_Vectorcall(self->original, args, flags, names);
    PyObject *key = PyLong_FromVoidPtr(args[0]);
    PyObject *entry = key ? PyDict_GetItemWithError(self->pending, key) : NULL;
    if (!entry) {
        PyErr_Clear();
        Py_XDECREF(key);
        return PyObject_Vectorcall(self->original, args, flags, names);
    }
    Counters *group = (Counters *)PyTuple_GET_ITEM(entry, 2);
    if (PyTuple_GET_SIZE(PyTuple_GET_ITEM(entry, 3)) || !PyObject_TypeCheck((PyObject *)group, counters_type) ||
        !group->blocking) {
        Py_DECREF(key);
        return PyObject_Vectorcall(self->slow, args, flags, names);
    }
    Py_INCREF(entry);
    PyObject *result = PyObject_Vectorcall(self->original, args, flags, names);
    if (!result)
        tell_failure(self, key);
    else if (PyDict_GetItemWithError(self->pending, key) == entry && self->ring->view.obj) {
        uint64_t begin = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(entry, 1));
        if (PyDict_DelItem(self->pending, key) == 0 && begin)
            mark_finished(self->ring, begin, COMPLETED, 1);
        PyErr_Clear();
    }
    Py_DECREF(entry);
    Py_DECREF(key);
    return result;
}

static int check_parts(Method *self) {
    return PyObject_TypeCheck(self->ring, ring_type) && PyDict_Check(self->pending) &&
           (!self->stacks || PyObject_TypeCheck(self->stacks, stacks_type)) &&
           (!self->groups || PyDict_Check(self->groups)) && (!self->shapes || PyDict_Check(self->shapes));
}

static void hold_parts(Method *self) {
    Py_INCREF(self->original);
    Py_INCREF(self->slow);
    Py_INCREF(self->failed);
    Py_INCREF(self->pending);
    Py_INCREF(self->ring);
    Py_XINCREF(self->groups);
    Py_XINCREF(self->shapes);
    Py_XINCREF(self->options_type);
    Py_XINCREF(self->sweep);
    Py_XINCREF(self->no_work);
    Py_XINCREF(self->stacks);
    self->enabled = self->direct = 1;
}

/* AllReduce(original, slow, failed, pending, ring, groups, shapes, options_type, sweep, no_work, stacks or None, op) */
static int AllReduce_init(Method *self, PyObject *args, PyObject *kwargs) {
    Method given = {.op = 0};
    if (self->original || !PyArg_ParseTuple(args, "OOOOOOOOOOOL", &given.original, &given.slow, &given.failed,
                                            &given.pending, &given.ring, &given.groups, &given.shapes,
                                            &given.options_type, &given.sweep, &given.no_work, &given.stacks,
                                            &given.op))
        return -1;
    if ((PyObject *)given.stacks == Py_None)
        given.stacks = NULL;
    if (!check_parts(&given)) {
        PyErr_SetString(PyExc_TypeError, "AllReduce takes parts of this module");
        return -1;
    }
    memcpy(&self->original, &given.original, sizeof(Method) - offsetof(Method, original));
    self->vectorcall = AllReduce_call;
    hold_parts(self);
    return 0;
}

/* Wait(original, slow, failed, pending, ring) */
static int Wait_init(Method *self, PyObject *args, PyObject *kwargs) {
    Method given = {.op = 0};
    if (self->original || !PyArg_ParseTuple(args, "OOOOO", &given.original, &given.slow, &given.failed, &given.pending,
                                            &given.ring))
        return -1;
    if (!check_parts(&given)) {
        PyErr_SetString(PyExc_TypeError, "Wait takes parts of this module");
        return -1;
    }
    memcpy(&self->original, &given.original, sizeof(Method) - offsetof(Method, original));
    self->vectorcall = Wait_call;
    hold_parts(self);
    return 0;
}

static PyMemberDef Method_members[] = {
    {"enabled", T_BOOL, offsetof(Method, enabled), 0, "False: calls go straight to torch."},
    {"direct", T_BOOL, offsetof(Method, direct), 0, "False: every call takes the wrapper in Python."},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

#define METHOD_SLOTS(init, doc)                                                                                       \
    {                                                                                                                 \
        {Py_tp_init, init}, {Py_tp_dealloc, Method_dealloc}, {Py_tp_descr_get, Method_get},                           \
            {Py_tp_call, PyVectorcall_Call}, {Py_tp_members, Method_members}, {Py_tp_doc, doc}, {0, NULL},            \
    }

static PyType_Slot AllReduce_slots[] = METHOD_SLOTS(AllReduce_init, "ProcessGroup.allreduce, recorded.");
static PyType_Slot Wait_slots[] = METHOD_SLOTS(Wait_init, "Work.wait, recorded.");

enum { METHOD_FLAGS = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR };
static PyType_Spec AllReduce_spec = {"allranks.record._fast.AllReduce", sizeof(Method), 0, METHOD_FLAGS, AllReduce_slots};
static PyType_Spec Wait_spec = {"allranks.record._fast.Wait", sizeof(Method), 0, METHOD_FLAGS, Wait_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", "The hot path of the recorder.", -1, NULL};

static PyObject *add_type(PyObject *made, const char *name, PyType_Spec *spec) {
    PyObject *type = made ? PyType_FromSpec(spec) : NULL;
    if (!type || PyModule_AddObject(made, name, Py_NewRef(type)) < 0)
        return NULL;
    return type; /* kept for ever: the checks above compare with it */
}

PyMODINIT_FUNC PyInit__fast(void) {
    PyObject *made = PyModule_Create(&module);
    ring_type = (PyTypeObject *)add_type(made, "Ring", &Ring_spec);
    stacks_type = (PyTypeObject *)add_type(made, "Stacks", &Stacks_spec);
    counters_type = (PyTypeObject *)add_type(made, "Counters", &Counters_spec);
    str_shape = PyUnicode_InternFromString("shape");
    str_dtype = PyUnicode_InternFromString("dtype");
    str_reduce_op = PyUnicode_InternFromString("reduceOp");
    no_parts = PyTuple_New(0);
    if (!ring_type || !stacks_type || !counters_type || !str_shape || !str_dtype || !str_reduce_op || !no_parts ||
        PyModule_AddIntConstant(made, "VERSION", 1) < 0 || !add_type(made, "AllReduce", &AllReduce_spec) || !add_type(made, "Wait", &Wait_spec))
        return NULL;
    return made;
}
