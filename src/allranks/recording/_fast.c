/* The hot path of the recorder in C: writes rows, notes their end, finds stacks. Plain CPython API, no torch.
 *
 * Optional: `hook.py`, `writer.py` and `stack.py` do the same in Python, some ten microseconds slower, and are used
 * when this module was not built. Both write the same bytes; tests/record runs the same tests over both.
 *
 * Ring   begin(...) fills a row in ascending order, `begin` first and `end` last, with release fences in between, so
 *        that a reader in another process never takes a half-written row for whole, on any CPU.
 * Stacks capture(frame) looks a stack up by its code objects and instructions.
 * Counters numbers the calls of one process group.
 * Markers puts CUDA events behind calls that leave no Work, and asks which of them the device has passed.
 * Collective, Batch, Wait  stand in for methods of ProcessGroup and Work in their most frequent form, and hand every
 *        other form to the wrapper written in Python. They hold the GIL throughout, except inside torch.
 * Forward  is a method of a proxy, which C++ calls.
 *
 * Other threads and processes run between two calls and leave the caches cold: what counts here is how few cache
 * lines a call touches, not how few instructions it takes.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <frameobject.h>
#include <structmember.h>
#if PY_VERSION_HEX >= 0x030B0000 && PY_VERSION_HEX < 0x030E0000 && !defined(Py_GIL_DISABLED) && defined(__has_include)
#if __has_include(<internal/pycore_frame.h>)
#define FRAMES_IN_PLACE
#endif
#endif
#ifdef FRAMES_IN_PLACE
#define Py_BUILD_CORE 1
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { HEADER_BYTES = 4096, ROW_BYTES = 136 };
enum { SCHEDULED = 0, STARTED = 1, COMPLETED = 2, FAILED = 3 };
enum { P2P = 1, PART = 2, BATCH_END = 4, RETIRED = 8 }; /* as Flag of model/trace.py */

typedef struct {
    uint64_t begin;
    int64_t created_ns, started_ns, completed_ns, seq, p2p_seq, op_id, step, in_numel, out_numel;
    int32_t timeout_ms, tag;
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

/* For distances: the other clock is only a label, and jumps when somebody sets it. */
static int64_t ticking_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static PyObject *no_parts; /* () */
static int rings; /* made so far: a forked child that records makes its own, and asks again who it is */
static _Thread_local uint32_t thread_id;
static _Thread_local int thread_asked;

/* ---- Ring ---------------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    uint64_t capacity, next, done;
    int64_t swept_ns; /* when the calls under way were last looked at */
    /* The call made last, while nobody else has asked for it: most are waited for at once and need no dict entry. */
    PyObject *last_work, *last_group; /* NULL: none */
    uint64_t last_begin;
    long long step;
    unsigned long label;
    int next_field, calls_field, last_field, done_field; /* indices of eight-byte header fields */
    PyObject *on_thread; /* called with the id of a thread at its first call; NULL or None: nobody wants to know */
} Ring;

/* Asked before a call draws its numbers: the answer to a new thread runs Python code, and other threads with it. */
static uint32_t native_thread(Ring *self) {
    if (thread_asked != rings) {
        thread_asked = rings;
        thread_id = (uint32_t)syscall(SYS_gettid);
        if (self->on_thread && self->on_thread != Py_None) {
            PyObject *answer = PyObject_CallFunction(self->on_thread, "k", (unsigned long)thread_id);
            if (!answer)
                PyErr_Clear();
            Py_XDECREF(answer);
        }
    }
    return thread_id;
}

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
    self->swept_ns = 0;
    self->step = -1;
    self->label = 0;
    return 0;
}

static void Ring_dealloc(Ring *self) {
    Py_XDECREF(self->last_work);
    Py_XDECREF(self->last_group);
    Py_XDECREF(self->on_thread);
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
    atomic_store_explicit((_Atomic int64_t *)self->view.buf + index, value, memory_order_relaxed);
}

typedef struct {
    long long group, op, shapes, in_numel, out_numel, stack, seq, p2p_seq, op_id, timeout_ms, reduce_op, root, peer, flags, tag;
} Call;

static uint64_t write_row(Ring *self, const Call *call) {
    uint32_t thread = native_thread(self);
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
    row->timeout_ms = call->timeout_ms > INT32_MAX ? INT32_MAX : (int32_t)call->timeout_ms;
    row->tag = (int32_t)call->tag;
    row->group = (uint32_t)call->group;
    row->op = (uint32_t)call->op;
    row->shapes = (uint32_t)call->shapes;
    row->stack = (uint32_t)call->stack;
    row->label = (uint32_t)self->label;
    row->thread = thread;
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

/* begin(group, op, shapes, stack, seq, p2p_seq, op_id, timeout_ms, reduce_op, root, peer, flags, tag) -> begin */
static PyObject *Ring_begin(Ring *self, PyObject *const *args, Py_ssize_t count) {
    Call call;
    if (count != 13) {
        PyErr_SetString(PyExc_TypeError, "begin takes 13 arguments");
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
    call.tag = PyLong_AsLongLong(args[12]);
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

static void mark_started(Ring *self, uint64_t begin, int64_t now) {
    volatile Row *row = row_of(self, begin);
    if (row->begin == begin) {
        row->started_ns = now;
        atomic_thread_fence(memory_order_release);
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
    mark_started(self, begin, now_ns());
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

/* Puts a call among the others that are under way, as (work, number, group, parts) under the identity of the work. */
static int keep(PyObject *pending, PyObject *work, uint64_t begin, PyObject *group, PyObject *parts) {
    PyObject *key = PyLong_FromVoidPtr(work), *number = PyLong_FromUnsignedLongLong(begin);
    PyObject *entry = key && number ? PyTuple_Pack(4, work, number, group, parts) : NULL;
    int failed = !entry || PyDict_SetItem(pending, key, entry) < 0;
    Py_XDECREF(entry);
    Py_XDECREF(number);
    Py_XDECREF(key);
    return failed ? -1 : 0;
}

/* The same for the call made last. */
static int hand_over(Ring *self, PyObject *pending) {
    PyObject *work = self->last_work, *group = self->last_group;
    if (!work)
        return 0;
    self->last_work = self->last_group = NULL;
    int failed = keep(pending, work, self->last_begin, group, no_parts);
    Py_DECREF(work);
    Py_DECREF(group);
    return failed;
}

static PyObject *Ring_hand_over(Ring *self, PyObject *pending) {
    if (!PyDict_Check(pending)) {
        PyErr_SetString(PyExc_TypeError, "calls under way are kept in a dict");
        return NULL;
    }
    if (hand_over(self, pending) < 0)
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
    {"hand_over", (PyCFunction)Ring_hand_over, METH_O, "Puts the call made last among those under way."},
    {"release", (PyCFunction)Ring_release, METH_NOARGS, "Lets go of the memory."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Ring_members[] = {
    {"on_thread", T_OBJECT, offsetof(Ring, on_thread), 0, "Called with the id of a thread at its first call, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Ring_slots[] = {
    {Py_tp_init, Ring_init},
    {Py_tp_dealloc, Ring_dealloc},
    {Py_tp_methods, Ring_methods},
    {Py_tp_members, Ring_members},
    {Py_tp_doc, "Rows of a black box."},
    {0, NULL},
};

static PyType_Spec Ring_spec = {"allranks.recording._fast.Ring", sizeof(Ring), 0, Py_TPFLAGS_DEFAULT, Ring_slots};

/* ---- Frames -------------------------------------------------------------------------------------------------- */

/* Python makes frame objects only when somebody asks for them. Where the layout of its inner frames is known they are
 * read in place: nothing is allocated, and one cache line is touched per frame instead of four. Other versions take
 * the public way, which owns a reference to the frame that it stands on. */
#ifdef FRAMES_IN_PLACE

typedef struct _PyInterpreterFrame *Frame;

static Frame visible(Frame frame) {
#if PY_VERSION_HEX >= 0x030C0000
    while (frame && frame->owner == FRAME_OWNED_BY_CSTACK)
        frame = frame->previous;
#endif
    return frame;
}

static Frame innermost(PyThreadState *thread) {
#if PY_VERSION_HEX >= 0x030D0000
    return visible(thread->current_frame);
#else
    return visible(thread->cframe->current_frame);
#endif
}

static Frame frame_of(PyObject *object) { return visible(((PyFrameObject *)object)->f_frame); }
static Frame outer(Frame frame) { return visible(frame->previous); }
static void drop(Frame frame) {}

static PyCodeObject *code_of(Frame frame) {
#if PY_VERSION_HEX >= 0x030D0000
    return (PyCodeObject *)frame->f_executable;
#else
    return frame->f_code;
#endif
}

static uint64_t place_in(Frame frame) {
#if PY_VERSION_HEX >= 0x030D0000
    return (uint64_t)(uintptr_t)frame->instr_ptr;
#else
    return (uint64_t)(uintptr_t)frame->prev_instr;
#endif
}

#else

typedef PyFrameObject *Frame;

static Frame innermost(PyThreadState *thread) { return PyThreadState_GetFrame(thread); }
static Frame frame_of(PyObject *object) { return (PyFrameObject *)Py_NewRef(object); }
static void drop(Frame frame) { Py_XDECREF(frame); }

static Frame outer(Frame frame) {
    Frame back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    return back;
}

static PyCodeObject *code_of(Frame frame) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    Py_DECREF(code); /* the frame keeps it */
    return code;
}

static uint64_t place_in(Frame frame) {
#if PY_VERSION_HEX >= 0x030B0000
    return (uint64_t)PyFrame_GetLasti(frame);
#else
    return (uint64_t)frame->f_lasti;
#endif
}

#endif

/* ---- Stacks -------------------------------------------------------------------------------------------------- */

enum { MAX_WALK = 256, LIBRARY_FRAMES = 3, MAX_CODES = 8192 }; /* as in stack.py */
enum { PLUMBING, LIBRARY, USER, THREAD_START };

/* One hash table serves both: code objects with their kind, and stacks with their id. It starts small, so that the
 * few stacks of a training loop share a few cache lines, and is never more than half full. */
typedef struct {
    uint64_t key; /* 0: empty */
    long value;
} Slot;

typedef struct {
    Slot *slots;
    uint64_t size, used; /* size is a power of two, or 0 */
} Table;

static Slot *slot_of(const Table *table, uint64_t key) {
    uint64_t at = (key * 0x9E3779B97F4A7C15u) >> 32;
    while (table->slots[at & (table->size - 1)].key && table->slots[at & (table->size - 1)].key != key)
        at++;
    return &table->slots[at & (table->size - 1)];
}

static int table_put(Table *table, uint64_t key, long value) {
    if (2 * (table->used + 1) > table->size) {
        Table bigger = {PyMem_Calloc(table->size ? 2 * table->size : 64, sizeof(Slot)),
                        table->size ? 2 * table->size : 64, table->used};
        if (!bigger.slots)
            return -1;
        for (uint64_t i = 0; i < table->size; i++)
            if (table->slots[i].key)
                *slot_of(&bigger, table->slots[i].key) = table->slots[i];
        PyMem_Free(table->slots);
        *table = bigger;
    }
    Slot *slot = slot_of(table, key);
    table->used += slot->key == 0;
    *slot = (Slot){key, value};
    return 0;
}

typedef struct {
    PyObject_HEAD
    PyObject *plumbing_starts, *plumbing_ends, *library_starts, *library_parts; /* tuples of str in file names */
    PyThreadState *main; /* whose stack is taken for a call that C++ makes on a thread of its own; may be NULL */
    int depth;
    Table kinds;  /* address of a code object, which is kept alive -> its kind */
    Table stacks; /* hash of a stack -> its id */
} Stacks;

static PyThreadState *thread_called(unsigned long ident) {
    PyThreadState *thread = PyInterpreterState_ThreadHead(PyInterpreterState_Get());
    while (thread && thread->thread_id != ident)
        thread = PyThreadState_Next(thread);
    return thread;
}

/* Stacks(depth, main_thread_ident, plumbing_starts, plumbing_ends, library_starts, library_parts) */
static int Stacks_init(Stacks *self, PyObject *args, PyObject *kwargs) {
    PyObject *starts, *ends, *library, *parts;
    unsigned long ident;
    int depth;
    if (!PyArg_ParseTuple(args, "ikO!O!O!O!", &depth, &ident, &PyTuple_Type, &starts, &PyTuple_Type, &ends,
                          &PyTuple_Type, &library, &PyTuple_Type, &parts))
        return -1;
    if (self->kinds.slots) {
        PyErr_SetString(PyExc_ValueError, "already open");
        return -1;
    }
    self->plumbing_starts = Py_NewRef(starts);
    self->plumbing_ends = Py_NewRef(ends);
    self->library_starts = Py_NewRef(library);
    self->library_parts = Py_NewRef(parts);
    self->main = thread_called(ident);
    self->depth = depth;
    if (table_put(&self->kinds, 1, PLUMBING) < 0 || table_put(&self->stacks, 1, 0) < 0) { /* makes room */
        PyErr_NoMemory();
        return -1;
    }
    return 0;
}

static void Stacks_dealloc(Stacks *self) {
    for (uint64_t i = 0; i < self->kinds.size; i++)
        if (self->kinds.slots[i].key > 1)
            Py_DECREF((PyObject *)(uintptr_t)self->kinds.slots[i].key);
    PyMem_Free(self->kinds.slots);
    PyMem_Free(self->stacks.slots);
    Py_XDECREF(self->plumbing_starts);
    Py_XDECREF(self->plumbing_ends);
    Py_XDECREF(self->library_starts);
    Py_XDECREF(self->library_parts);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static int touches(PyObject *name, PyObject *parts, int direction) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); i++)
        if (PyUnicode_Tailmatch(name, PyTuple_GET_ITEM(parts, i), 0, PY_SSIZE_T_MAX, direction) == 1)
            return 1;
    return 0;
}

static int contains(PyObject *name, PyObject *parts) {
    Py_ssize_t end = PyUnicode_GET_LENGTH(name);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); i++)
        if (PyUnicode_Find(name, PyTuple_GET_ITEM(parts, i), 0, end, +1) >= 0)
            return 1;
    return 0;
}

/* The kind of a code object, worked out once. Runs no Python code, so that no other thread moves meanwhile.
 * A full table leaves out what is new. */
static long kind_of(Stacks *self, PyCodeObject *code) {
    Slot *slot = slot_of(&self->kinds, (uint64_t)(uintptr_t)code);
    if (slot->key)
        return slot->value;
    PyObject *name = code->co_filename;
    long kind = USER;
    if (touches(name, self->plumbing_starts, -1) || touches(name, self->plumbing_ends, +1))
        kind = PLUMBING;
    else if (touches(name, self->library_starts, -1) || contains(name, self->library_parts))
        kind = PyUnicode_CompareWithASCIIString(code->co_name, "_bootstrap") ? LIBRARY : THREAD_START;
    PyErr_Clear();
    if (self->kinds.used > MAX_CODES || table_put(&self->kinds, (uint64_t)(uintptr_t)code, kind) < 0)
        return PLUMBING;
    Py_INCREF(code); /* its address is the key */
    return kind;
}

static uint64_t mixed(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

typedef struct {
    uint64_t hash;
    int left, library, users; /* frames that may still be kept, library frames among them; user frames seen */
    int from_python;          /* the thread was started by Python's threading: what it does is its own affair */
} Walk;

static void walk(Stacks *self, Frame frame, Walk *seen) {
    for (int walked = MAX_WALK; frame && seen->left && walked; walked--) {
        PyCodeObject *code = code_of(frame);
        long kind = kind_of(self, code);
        if (kind == USER || (kind == LIBRARY && seen->library)) {
            seen->library -= kind == LIBRARY;
            seen->users += kind == USER;
            seen->left--;
            seen->hash = mixed(mixed(seen->hash, (uint64_t)(uintptr_t)code), place_in(frame));
        }
        seen->from_python |= kind == THREAD_START;
        frame = outer(frame);
    }
    drop(frame);
}

/* A hash of the frames that are kept of the stack that starts here, by code object and instruction; 0 when none is.
 * On a thread that C++ made (autograd's) the user's line is in the main thread, which waits in backward(): its frames
 * follow. 64 bits are taken for the stack itself: two of 20,000 stacks share one with a probability of 1e-11. */
static uint64_t key_of(Stacks *self, Frame frame) {
    Walk seen = {.left = self->depth, .library = LIBRARY_FRAMES};
    walk(self, frame, &seen);
    if (!seen.users && !seen.from_python && self->main && PyThreadState_Get() != self->main)
        walk(self, innermost(self->main), &seen);
    return seen.left == self->depth ? 0 : seen.hash > 1 ? seen.hash : 2;
}

static long id_of(Stacks *self, uint64_t key) {
    Slot *slot = key ? slot_of(&self->stacks, key) : NULL;
    return !slot ? 0 : slot->key ? slot->value : -1;
}

/* The id of the stack of this call; 0 when there is none, -1 when it is new. */
static long find_stack(Stacks *self) { return id_of(self, key_of(self, innermost(PyThreadState_Get()))); }

/* capture(frame) -> id; 0 without frames of interest, -1 when this stack is new. */
static PyObject *Stacks_capture(Stacks *self, PyObject *frame) {
    return PyLong_FromLong(PyFrame_Check(frame) ? id_of(self, key_of(self, frame_of(frame))) : 0);
}

/* remember(frame, id): the stack that starts here has this id. */
static PyObject *Stacks_remember(Stacks *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 2 || !PyFrame_Check(args[0])) {
        PyErr_SetString(PyExc_TypeError, "remember takes a frame and an id");
        return NULL;
    }
    long id = PyLong_AsLong(args[1]);
    if (id == -1 && PyErr_Occurred())
        return NULL;
    uint64_t key = key_of(self, frame_of(args[0]));
    if (key && table_put(&self->stacks, key, id) < 0)
        return PyErr_NoMemory();
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

static PyType_Spec Stacks_spec = {"allranks.recording._fast.Stacks", sizeof(Stacks), 0, Py_TPFLAGS_DEFAULT, Stacks_slots};

/* ---- Counters ------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    long long number, seq, p2p_seq, op_id, timeout_ms;
    char blocking;
    long long batch_seq, batch_p2p; /* numbers of the open batch; 0: not drawn yet */
    PyObject *parts; /* list: numbers of the calls in the open batch; NULL: none is open */
    PyObject *ranks; /* tuple: global ranks in group order */
    PyObject *cpu_side; /* Counters that stand for calls on CPU tensors when these have a backend of their own, or None */
} Counters;

static int Counters_init(Counters *self, PyObject *args, PyObject *kwargs) {
    int blocking;
    PyObject *ranks;
    if (!PyArg_ParseTuple(args, "LLpO!", &self->number, &self->timeout_ms, &blocking, &PyTuple_Type, &ranks))
        return -1;
    self->blocking = (char)blocking;
    self->seq = self->p2p_seq = self->op_id = 0;
    Py_CLEAR(self->parts);
    Py_XSETREF(self->ranks, Py_NewRef(ranks));
    Py_XSETREF(self->cpu_side, Py_NewRef(Py_None));
    return 0;
}

static void Counters_dealloc(Counters *self) {
    Py_XDECREF(self->parts);
    Py_XDECREF(self->ranks);
    Py_XDECREF(self->cpu_side);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* Draws the numbers of the next call. Calls of one batch share one p2p and one collective number. */
static void draw_numbers(Counters *self, int p2p, Call *call) {
    call->op_id = ++self->op_id;
    call->flags = p2p ? P2P : 0;
    if (!self->parts) {
        call->seq = p2p ? self->seq : ++self->seq;
        call->p2p_seq = p2p ? ++self->p2p_seq : 0;
        return;
    }
    if (p2p && !self->batch_p2p)
        self->batch_p2p = ++self->p2p_seq;
    else if (!p2p && !self->batch_seq)
        self->batch_seq = ++self->seq;
    call->seq = self->batch_seq ? self->batch_seq : self->seq;
    call->p2p_seq = p2p ? self->batch_p2p : 0;
    call->flags |= PART;
}

static int add_part(Counters *self, uint64_t begin) {
    PyObject *number = self->parts ? PyLong_FromUnsignedLongLong(begin) : NULL;
    int failed = !number || PyList_Append(self->parts, number) < 0;
    Py_XDECREF(number);
    return failed ? -1 : 0;
}

static PyObject *Counters_draw(Counters *self, PyObject *p2p) {
    Call call;
    draw_numbers(self, p2p == Py_True, &call);
    return Py_BuildValue("LLLL", call.seq, call.p2p_seq, call.op_id, call.flags);
}

static PyObject *Counters_add_part(Counters *self, PyObject *number) {
    if (self->parts && PyList_Append(self->parts, number) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* The calls from now on are parts of one batch. */
static int open_batch(Counters *self) {
    PyObject *parts = PyList_New(0);
    if (!parts)
        return -1;
    self->batch_seq = self->batch_p2p = 0;
    Py_XSETREF(self->parts, parts);
    return 0;
}

/* Draws the numbers of the open batch and ends it; returns a tuple of its calls' numbers, NULL with an exception. */
static PyObject *close_batch(Counters *self, Call *call) {
    PyObject *parts = self->parts ? PyList_AsTuple(self->parts) : Py_NewRef(no_parts);
    if (!parts)
        return NULL;
    Py_CLEAR(self->parts);
    call->seq = self->batch_seq ? self->batch_seq : self->seq;
    call->p2p_seq = self->batch_p2p;
    call->op_id = ++self->op_id;
    call->flags = BATCH_END | (call->p2p_seq ? P2P : 0);
    self->batch_seq = self->batch_p2p = 0;
    return parts;
}

static PyObject *Counters_open_batch(Counters *self, PyObject *unused) {
    if (open_batch(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *Counters_close_batch(Counters *self, PyObject *unused) {
    Call call;
    PyObject *parts = close_batch(self, &call);
    return parts ? Py_BuildValue("LLLN", call.seq, call.p2p_seq, call.op_id, parts) : NULL;
}

static PyMethodDef Counters_methods[] = {
    {"draw", (PyCFunction)Counters_draw, METH_O, "(seq, p2p_seq, op_id, flags) of the next call."},
    {"add_part", (PyCFunction)Counters_add_part, METH_O, "A call belongs to the open batch."},
    {"open_batch", (PyCFunction)Counters_open_batch, METH_NOARGS, "The calls from now on are parts of one batch."},
    {"close_batch", (PyCFunction)Counters_close_batch, METH_NOARGS, "(seq, p2p_seq, op_id, parts) of the batch."},
    {NULL, NULL, 0, NULL},
};

static PyObject *Counters_in_batch(Counters *self, void *unused) { return PyBool_FromLong(self->parts != NULL); }

static PyGetSetDef Counters_getset[] = {
    {"in_batch", (getter)Counters_in_batch, NULL, "Whether a batch is open.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef Counters_members[] = {
    {"number", T_LONGLONG, offsetof(Counters, number), READONLY, "Id of the group in the black box."},
    {"timeout_ms", T_LONGLONG, offsetof(Counters, timeout_ms), 0, "Timeout of the group; 0 unknown."},
    {"blocking", T_BOOL, offsetof(Counters, blocking), READONLY, "wait() returns when the call is over."},
    {"cpu_side", T_OBJECT, offsetof(Counters, cpu_side), 0, "Stand for calls on CPU tensors, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Counters_slots[] = {
    {Py_tp_init, Counters_init},       {Py_tp_dealloc, Counters_dealloc},
    {Py_tp_methods, Counters_methods}, {Py_tp_members, Counters_members},
    {Py_tp_getset, Counters_getset},   {Py_tp_doc, "Numbers of one process group's calls."},
    {0, NULL},
};

static PyType_Spec Counters_spec = {
    "allranks.recording._fast.Counters", sizeof(Counters), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, Counters_slots};

static PyTypeObject *ring_type, *stacks_type, *counters_type, *markers_type;
static PyObject *str_shape, *str_dtype, *str_is_cpu, *str_original, *str_opts;

/* ---- Markers ------------------------------------------------------------------------------------------------- */

/* A call of NCCL that gives out no Work, or whose Work was waited for, is over when the device has passed an event
 * behind it. Events are recorded and asked through CUDA's driver, whose functions keep no "last error" that torch
 * could find. The GIL is released around them: they wait while a thread that loads a kernel holds the context. */
enum { MAX_DEVICES = 64, MAX_MARKS = 1 << 15, NO_TIMING = 2, NOT_READY = 600, ASKED_AT_ONCE = 128 };

static struct {
    void **events;
    int count, room;
} spare[MAX_DEVICES]; /* events that mark nothing; kept for the life of the process, since they are dear */

typedef struct {
    void *event;
    uint64_t begin;
    PyObject *parts; /* numbers of the calls that end with it; NULL: none */
    int device;
} Mark;

typedef struct {
    PyObject_HEAD
    Ring *ring;
    PyObject *in_use, *device, *stream; /* torch: is CUDA initialised, the current device, its current stream */
    int (*create)(void **, unsigned), (*record)(void *, void *), (*query)(void *), (*capturing)(void *, int *);
    Mark *marks;
    int count, room, asking, marking;
    char ready, paused;
} Markers;

/* Markers(ring, in_use, device, stream, addresses of cuEventCreate, cuEventRecord, cuEventQuery, cuStreamIsCapturing) */
static int Markers_init(Markers *self, PyObject *args, PyObject *kwargs) {
    unsigned long long create, record, query, capturing;
    PyObject *ring, *in_use, *device, *stream;
    if (self->ring || !PyArg_ParseTuple(args, "O!OOOKKKK", ring_type, &ring, &in_use, &device, &stream, &create,
                                        &record, &query, &capturing))
        return -1;
    self->ring = (Ring *)Py_NewRef(ring);
    self->in_use = Py_NewRef(in_use);
    self->device = Py_NewRef(device);
    self->stream = Py_NewRef(stream);
    self->create = (int (*)(void **, unsigned))(uintptr_t)create;
    self->record = (int (*)(void *, void *))(uintptr_t)record;
    self->query = (int (*)(void *))(uintptr_t)query;
    self->capturing = (int (*)(void *, int *))(uintptr_t)capturing;
    return 0;
}

static void spare_event(int device, void *event) {
    if (spare[device].count == spare[device].room) {
        int room = spare[device].room ? 2 * spare[device].room : 64;
        void **events = PyMem_Realloc(spare[device].events, (size_t)room * sizeof *events);
        if (!events)
            return; /* lost */
        spare[device].events = events;
        spare[device].room = room;
    }
    spare[device].events[spare[device].count++] = event;
}

static void Markers_dealloc(Markers *self) {
    for (int i = 0; i < self->count; i++) {
        spare_event(self->marks[i].device, self->marks[i].event);
        Py_XDECREF(self->marks[i].parts);
    }
    PyMem_Free(self->marks);
    Py_XDECREF(self->ring);
    Py_XDECREF(self->in_use);
    Py_XDECREF(self->device);
    Py_XDECREF(self->stream);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

/* The current device and the address of its current stream; 0 with no exception left when there is none. */
static int current_stream(Markers *self, int *device, void **stream) {
    if (!self->ready) {
        PyObject *answer = PyObject_CallNoArgs(self->in_use);
        self->ready = answer == Py_True; /* it stays so */
        Py_XDECREF(answer);
    }
    PyObject *number = self->ready ? PyObject_CallNoArgs(self->device) : NULL;
    PyObject *address = number ? PyObject_CallOneArg(self->stream, number) : NULL;
    long index = number ? PyLong_AsLong(number) : -1;
    *stream = address ? PyLong_AsVoidPtr(address) : NULL;
    *device = (int)index;
    Py_XDECREF(number);
    int found = address && index >= 0 && index < MAX_DEVICES && !PyErr_Occurred();
    Py_XDECREF(address);
    PyErr_Clear();
    return found;
}

static int room_for_mark(Markers *self) {
    if (self->count < self->room)
        return 1;
    int room = self->room ? 2 * self->room : 256;
    Mark *marks = room > MAX_MARKS ? NULL : PyMem_Realloc(self->marks, (size_t)room * sizeof *marks);
    if (!marks)
        return 0;
    self->marks = marks;
    self->room = room;
    return 1;
}

/* Puts an event behind what is queued on the current stream; the calls `begin` and `parts` (a tuple, or NULL) are over
 * when the device has passed it. 0: not possible, or a graph is being captured. */
static int mark_device(Markers *self, uint64_t begin, PyObject *parts) {
    void *stream, *event = NULL;
    int device, status = 0, failed;
    if (self->paused || !current_stream(self, &device, &stream))
        return 0;
    if (spare[device].count)
        event = spare[device].events[--spare[device].count];
    self->marking++;
    Py_BEGIN_ALLOW_THREADS
    failed = self->capturing(stream, &status) || status || (!event && self->create(&event, NO_TIMING)) ||
             self->record(event, stream);
    Py_END_ALLOW_THREADS
    self->marking--;
    if (failed || !room_for_mark(self)) {
        if (event)
            spare_event(device, event);
        return 0;
    }
    PyObject *kept = parts && PyTuple_GET_SIZE(parts) ? Py_NewRef(parts) : NULL;
    self->marks[self->count++] = (Mark){event, begin, kept, device};
    return 1;
}

static void finish_parts(Ring *ring, PyObject *parts, int state) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); i++)
        mark_finished(ring, PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(parts, i)), state, 0);
}

static void end_marked(Markers *self, Mark *mark, int state) {
    spare_event(mark->device, mark->event);
    if (!self->ring->view.obj)
        return;
    mark_finished(self->ring, mark->begin, state, 1);
    if (mark->parts)
        finish_parts(self->ring, mark->parts, state);
}

/* Asks `count` marks from the one at `at` on, and notes what has ended; returns how many are still there. A short look
 * stops at the first that the device has not passed. */
static int ask_marks(Markers *self, int at, int count, int whole) {
    void *events[ASKED_AT_ONCE];
    int answers[ASKED_AT_ONCE], asked = 0, left = 0;
    for (int i = 0; i < count; i++)
        events[i] = self->marks[at + i].event;
    Py_BEGIN_ALLOW_THREADS
    while (asked < count) {
        answers[asked] = self->query(events[asked]);
        if (answers[asked++] == NOT_READY && !whole)
            break;
    }
    Py_END_ALLOW_THREADS
    Mark *marks = self->marks + at; /* may have moved; others only add at the end */
    PyObject *dropped[ASKED_AT_ONCE];
    int drops = 0;
    for (int i = 0; i < asked; i++)
        if (answers[i] == NOT_READY)
            marks[left++] = marks[i];
        else {
            end_marked(self, &marks[i], answers[i] == 0 ? COMPLETED : FAILED);
            dropped[drops++] = marks[i].parts;
        }
    memmove(marks + left, marks + asked, (size_t)(self->count - at - asked) * sizeof *marks);
    self->count -= asked - left;
    while (drops)
        Py_XDECREF(dropped[--drops]);
    return left + count - asked;
}

static void settle_marks(Markers *self, int limit, int whole) {
    if (self->asking || self->paused)
        return; /* another thread is at it, or no event may be asked */
    self->asking = 1;
    for (int at = 0, count; limit > 0 && at < self->count && !self->paused; limit -= count) {
        count = self->count - at < ASKED_AT_ONCE ? self->count - at : ASKED_AT_ONCE;
        at += ask_marks(self, at, count < limit ? count : limit, whole);
        if (!whole)
            break;
    }
    self->asking = 0;
}

static PyObject *Markers_mark(Markers *self, PyObject *args) {
    unsigned long long begin;
    PyObject *parts;
    if (!PyArg_ParseTuple(args, "KO!", &begin, &PyTuple_Type, &parts))
        return NULL;
    return PyBool_FromLong(mark_device(self, begin, parts));
}

static PyObject *Markers_settle(Markers *self, PyObject *unused) {
    settle_marks(self, MAX_MARKS, 1);
    Py_RETURN_NONE;
}

static PyObject *Markers_busy(Markers *self, void *unused) { return PyBool_FromLong(self->asking || self->marking); }
static Py_ssize_t Markers_length(Markers *self) { return self->count; }

static PyMethodDef Markers_methods[] = {
    {"mark", (PyCFunction)Markers_mark, METH_VARARGS, "Follows a call and its parts; False: not possible now."},
    {"settle", (PyCFunction)Markers_settle, METH_NOARGS, "Notes every call that the device has passed."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Markers_members[] = {
    {"paused", T_BOOL, offsetof(Markers, paused), 0, "A graph is captured: no event is recorded or asked."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef Markers_getset[] = {
    {"busy", (getter)Markers_busy, NULL, "Whether a thread is in CUDA's driver for us.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Markers_slots[] = {
    {Py_tp_init, Markers_init},       {Py_tp_dealloc, Markers_dealloc}, {Py_tp_methods, Markers_methods},
    {Py_tp_members, Markers_members}, {Py_tp_getset, Markers_getset},   {Py_sq_length, Markers_length},
    {Py_tp_doc, "Events behind calls."}, {0, NULL},
};

static PyType_Spec Markers_spec = {"allranks.recording._fast.Markers", sizeof(Markers), 0, Py_TPFLAGS_DEFAULT, Markers_slots};

/* ---- Collective, Wait and Forward ---------------------------------------------------------------------------- */

enum { NOWHERE = -1, SWEEP_MARKS = 8, SWEEP_NS = 1000000 /* between two looks at the calls under way; as in writer.py */ };

/* Where an options object of torch keeps its fields: the address of the C++ value stands at `value_at` in the Python
 * object, the fields at these places in the value (inplace.py finds them and tries them out). NOWHERE: it has none. */
typedef struct {
    PyTypeObject *type;
    int value_at, reduce_at, root_at, timeout_at;
} Layout;

/* Which argument of a method is what; `self` is argument 0, and 0 says that there is none. */
typedef struct {
    int count, out, in, out_splits, in_splits, options, peer, tag;
} Form;

/* A recorded method of torch: `original` is torch's function, `slow` the wrapper in Python (Wait has none), `failed` is
 * told of an error of `original`. Wait uses `waited` and nothing from `groups` on. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *original, *slow, *failed, *pending, *waited;
    Ring *ring;
    Markers *markers; /* NULL: no device whose events we know how to use */
    PyObject *groups, *shapes, *learn, *sweep, *no_work;
    Stacks *stacks; /* NULL: no stacks */
    Layout layout;
    Form form;
    long long op;
    char enabled, direct;
} Method;

static void Method_dealloc(Method *self) {
    PyObject **parts[] = {&self->original, &self->slow, &self->failed, &self->pending, &self->waited,
                          (PyObject **)&self->ring, (PyObject **)&self->markers, &self->groups, &self->shapes,
                          &self->learn, &self->sweep, &self->no_work, (PyObject **)&self->stacks,
                          (PyObject **)&self->layout.type};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        Py_CLEAR(*parts[i]);
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

/* What Python answers to a notice is of no use to us. */
static void ask(PyObject *answer) {
    if (!answer)
        PyErr_Clear();
    Py_XDECREF(answer);
}

/* Tells `failed(number, error, parts)` of the exception that is set, and sets it again. */
static void tell_failure(Method *self, unsigned long long number, PyObject *parts) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    ask(PyObject_CallFunction(self->failed, "KOO", number, error ? error : Py_None, parts));
    PyErr_Restore(kind, error, trace);
}

static long long global_rank(const Counters *group, long long rank) {
    return rank >= 0 && rank < PyTuple_GET_SIZE(group->ranks) ? PyLong_AsLongLong(PyTuple_GET_ITEM(group->ranks, rank))
                                                             : rank;
}

/* Root, operator and timeout of an options object, read in place; 0 when Python must look at it. */
static int read_options(const Layout *layout, PyObject *options, const Counters *group, Call *call) {
    if (Py_TYPE(options) != layout->type)
        return 0;
    const char *value = *(char **)((char *)options + layout->value_at);
    int64_t timeout, root;
    if (!value)
        return 0;
    memcpy(&timeout, value + layout->timeout_at, sizeof timeout);
    if (timeout > 0)
        call->timeout_ms = timeout;
    if (layout->reduce_at != NOWHERE) {
        uint8_t reduce = *(const uint8_t *)(value + layout->reduce_at);
        call->reduce_op = reduce + 1;
        if (reduce > 8)
            return 0;
    }
    if (layout->root_at != NOWHERE) {
        memcpy(&root, value + layout->root_at, sizeof root);
        if (root < 0 || root >= PyTuple_GET_SIZE(group->ranks))
            return 0;
        call->root = global_rank(group, root);
    }
    return 1;
}

/* The sizes and dtypes of a call's tensors, and its splits: what its shapes are looked up by. */
enum { MAX_PARTS = 68 };
typedef struct {
    PyObject *parts[MAX_PARTS];
    int count;
} Key;

static int add_to_key(Key *key, PyObject *part) {
    if (!part || key->count == MAX_PARTS) {
        Py_XDECREF(part);
        return 0;
    }
    key->parts[key->count++] = part;
    return 1;
}

/* A tensor, a list of tensors or a list of such lists; 0 when it is something else, or has very many. In a list of lists the
 * first tensor of each tells its type: torch refuses several in one. */
static int add_tensors(Key *key, PyObject *given, int depth, int with_type) {
    if (!PyList_CheckExact(given))
        return add_to_key(key, PyObject_GetAttr(given, str_shape)) &&
               (!with_type || add_to_key(key, PyObject_GetAttr(given, str_dtype)));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); i++) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(given, i)); /* a tensor of the user's class may change the list */
        int added = depth < 2 && add_tensors(key, item, depth + 1, with_type && !(depth && i));
        Py_DECREF(item);
        if (!added)
            return 0;
    }
    return 1;
}

static int add_splits(Key *key, PyObject *splits) {
    return (PyList_CheckExact(splits) || PyTuple_CheckExact(splits)) && add_to_key(key, PySequence_Tuple(splits));
}

static PyObject *key_of_tensors(const Form *form, PyObject *const *args) {
    Key key = {.count = 0};
    int whole = !form->out || add_tensors(&key, args[form->out], 0, 1);
    if (whole && form->out && form->in)
        whole = add_to_key(&key, Py_NewRef(Py_None)) && add_tensors(&key, args[form->in], 0, 1);
    else if (whole && form->in)
        whole = add_tensors(&key, args[form->in], 0, 1);
    if (whole && form->out_splits)
        whole = add_splits(&key, args[form->out_splits]) && add_splits(&key, args[form->in_splits]);
    PyObject *made = whole ? PyTuple_New(key.count) : NULL;
    for (int i = 0; i < key.count; i++)
        if (made)
            PyTuple_SET_ITEM(made, i, key.parts[i]);
        else
            Py_DECREF(key.parts[i]);
    return made;
}

/* The shapes of a call, by its tensors; Python works out what is new. */
static int find_shapes(Method *self, PyObject *const *args, Call *call) {
    if (!self->form.out && !self->form.in)
        return 1;
    PyObject *key = key_of_tensors(&self->form, args);
    PyObject *known = key ? Py_XNewRef(PyDict_GetItemWithError(self->shapes, key)) : NULL;
    if (key && !known && !PyErr_Occurred()) {
        PyObject *rest = PyTuple_New(self->form.count - 1);
        for (int i = 1; rest && i < self->form.count; i++)
            PyTuple_SET_ITEM(rest, i - 1, Py_NewRef(args[i]));
        known = rest ? PyObject_CallFunctionObjArgs(self->learn, self->shapes, key, rest, NULL) : NULL;
        Py_XDECREF(rest);
    }
    int fine = known && read_shapes(known, call) == 0;
    Py_XDECREF(known);
    Py_XDECREF(key);
    return fine;
}

/* What is known of a call before it is made; 0 with no exception left: use `slow`. */
static int describe(Method *self, Counters *group, PyObject *const *args, Call *call) {
    const Form *form = &self->form;
    if (form->options && !read_options(&self->layout, args[form->options], group, call))
        return 0;
    if (form->peer) {
        long long peer = PyLong_AsLongLong(args[form->peer]), tag = PyLong_AsLongLong(args[form->tag]);
        call->peer = global_rank(group, peer);
        call->tag = tag & 0x7FFFFFFF;
    }
    int fine = !PyErr_Occurred() && find_shapes(self, args, call);
    PyErr_Clear();
    call->stack = fine && self->stacks ? find_stack(self->stacks) : 0;
    return fine && call->stack >= 0;
}

/* The counters of a group that Python has met; else NULL. */
static Counters *known_group(Method *self, PyObject *group) {
    PyObject *key = PyLong_FromVoidPtr(group);
    PyObject *found = key ? PyDict_GetItemWithError(self->groups, key) : NULL;
    Py_XDECREF(key);
    PyErr_Clear();
    if (!found || !PyObject_TypeCheck(found, counters_type))
        return NULL;
    return (Counters *)Py_NewRef(found);
}

/* Which side of the group this call went to: in one with several backends the tensor decides. Borrowed. */
static Counters *side_of(Counters *group, PyObject *tensors) {
    if (!PyObject_TypeCheck(group->cpu_side, counters_type))
        return group;
    PyObject *tensor = Py_NewRef(tensors);
    while (PyList_CheckExact(tensor) && PyList_GET_SIZE(tensor))
        Py_SETREF(tensor, Py_NewRef(PyList_GET_ITEM(tensor, 0)));
    PyObject *answer = PyObject_GetAttr(tensor, str_is_cpu);
    int on_cpu = answer == Py_True;
    Py_DECREF(tensor);
    ask(answer);
    return on_cpu ? (Counters *)group->cpu_side : group;
}

/* Other calls may have ended meanwhile: they are looked at once in a while. */
static void look_around(Method *self) {
    Ring *ring = self->ring;
    int64_t now = ticking_ns();
    int marks = self->markers ? self->markers->count : 0, works = PyDict_GET_SIZE(self->pending) > 0;
    if ((!marks && !works) || now - ring->swept_ns < SWEEP_NS)
        return;
    ring->swept_ns = now;
    if (marks)
        settle_marks(self->markers, SWEEP_MARKS, 0);
    if (works)
        ask(PyObject_CallNoArgs(self->sweep));
}

/* The library has returned no Work: the call and its parts are over, or queued on the device. */
static void follow_device(Method *self, Counters *group, uint64_t begin, PyObject *parts) {
    if (group->blocking) {
        mark_finished(self->ring, begin, COMPLETED, 1);
        finish_parts(self->ring, parts, COMPLETED);
    } else if (!self->markers || !mark_device(self->markers, begin, parts))
        ask(PyObject_CallFunction(self->no_work, "KOO", (unsigned long long)begin, (PyObject *)group, parts));
}

/* The library has answered. */
static void follow(Method *self, Counters *group, PyObject *work, uint64_t begin) {
    Ring *ring = self->ring;
    if (work == Py_None)
        follow_device(self, group, begin, no_parts);
    else {
        if (group->blocking)
            mark_started(ring, begin, now_ns());
        if (hand_over(ring, self->pending) < 0)
            PyErr_Clear();
        ring->last_work = Py_NewRef(work);
        ring->last_group = Py_NewRef((PyObject *)group);
        ring->last_begin = begin;
    }
    look_around(self);
}

/* Whether this is the form in which torch.distributed makes the call: all arguments, at most `opts` by its name. */
static int usual(const Method *self, size_t flags, PyObject *names) {
    Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    return self->direct && PyVectorcall_NARGS(flags) + named == self->form.count && self->ring->view.obj &&
           (!named || (named == 1 && self->form.options == self->form.count - 1 &&
                       PyUnicode_Compare(PyTuple_GET_ITEM(names, 0), str_opts) == 0));
}

static PyObject *Collective_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    if (!self->enabled)
        return PyObject_Vectorcall(self->original, args, flags, names);
    Call call = {.op = self->op, .root = -1, .peer = -1, .tag = -1};
    const Form *form = &self->form;
    Counters *group = usual(self, flags, names) ? known_group(self, args[0]) : NULL;
    if (!group || !describe(self, group, args, &call) || (!form->out && !form->in && group->cpu_side != Py_None)) {
        Py_XDECREF(group);
        return PyObject_Vectorcall(self->slow, args, flags, names);
    }
    native_thread(self->ring);
    call.group = group->number;
    if (!call.timeout_ms)
        call.timeout_ms = group->timeout_ms;
    draw_numbers(group, form->peer != 0, &call);
    uint64_t begin = write_row(self->ring, &call);
    if (call.flags & PART && add_part(group, begin) < 0)
        PyErr_Clear();
    PyObject *work = PyObject_Vectorcall(self->original, args, flags, names);
    if (!work)
        tell_failure(self, begin, no_parts);
    else if (self->ring->view.obj && !group->parts)
        follow(self, form->out || form->in ? side_of(group, args[form->in ? form->in : form->out]) : group, work, begin);
    Py_DECREF(group);
    return work;
}

/* The start of a batch. */
static PyObject *Start_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    Counters *group = self->enabled && PyVectorcall_NARGS(flags) ? known_group(self, args[0]) : NULL;
    int fine = group && open_batch(group) == 0;
    PyErr_Clear();
    Py_XDECREF(group);
    return PyObject_Vectorcall(fine || !self->enabled ? self->original : self->slow, args, flags, names);
}

/* The end of a batch: its row stands for all of its calls, and the Work that it returns for their end. */
static PyObject *End_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    if (!self->enabled)
        return PyObject_Vectorcall(self->original, args, flags, names);
    Ring *ring = self->ring;
    int usable = self->direct && PyVectorcall_NARGS(flags) && ring->view.obj;
    Counters *group = usable ? known_group(self, args[0]) : NULL;
    Call call = {.op = self->op, .root = -1, .peer = -1, .tag = -1};
    call.stack = group && self->stacks ? find_stack(self->stacks) : 0;
    native_thread(ring);
    PyObject *parts = group && call.stack >= 0 ? close_batch(group, &call) : NULL;
    if (!parts) {
        PyErr_Clear();
        Py_XDECREF(group);
        return PyObject_Vectorcall(self->slow, args, flags, names);
    }
    call.group = group->number;
    call.timeout_ms = group->timeout_ms;
    uint64_t begin = write_row(ring, &call);
    PyObject *work = PyObject_Vectorcall(self->original, args, flags, names);
    if (!work)
        tell_failure(self, begin, parts);
    else if (ring->view.obj) {
        if (work == Py_None)
            follow_device(self, group, begin, parts);
        else {
            if (group->blocking)
                mark_started(ring, begin, now_ns());
            if (keep(self->pending, work, begin, (PyObject *)group, parts) < 0)
                PyErr_Clear();
        }
        look_around(self);
    }
    Py_DECREF(parts);
    Py_DECREF(group);
    return work;
}

/* Tells `failed(work, error, limited)` of the exception that is set, and sets it again. */
static void tell_wait_failure(Method *self, PyObject *work, int limited) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    if (hand_over(self->ring, self->pending) < 0)
        PyErr_Clear();
    ask(PyObject_CallFunctionObjArgs(self->failed, work, error ? error : Py_None, limited ? Py_True : Py_False, NULL));
    PyErr_Restore(kind, error, trace);
}

/* The program's wait() for the call made last has returned, which is not among the others: it ends here, or when the
 * device has passed this point. The Work is let go: it would keep its tensors in the device's memory. */
static int end_last(Method *self) {
    Ring *ring = self->ring;
    uint64_t begin = ring->last_begin;
    PyObject *work = ring->last_work, *group = ring->last_group;
    ring->last_work = ring->last_group = NULL; /* other threads run while CUDA is asked */
    int ended = ((Counters *)group)->blocking;
    if (ended)
        mark_finished(ring, begin, COMPLETED, 1);
    else if (self->markers)
        ended = mark_device(self->markers, begin, NULL);
    if (!ended) {
        if (hand_over(ring, self->pending) < 0)
            PyErr_Clear();
        ring->last_work = Py_NewRef(work);
        ring->last_group = Py_NewRef(group);
        ring->last_begin = begin;
    }
    Py_DECREF(work);
    Py_DECREF(group);
    return ended;
}

/* The same for a call among the others: (work, number, group, parts). */
static int end_pending(Method *self, PyObject *key, PyObject *entry) {
    if (!self->markers || !PyTuple_CheckExact(entry) || PyTuple_GET_SIZE(entry) != 4 ||
        !PyObject_TypeCheck(PyTuple_GET_ITEM(entry, 2), counters_type) ||
        ((Counters *)PyTuple_GET_ITEM(entry, 2))->blocking || PyDict_DelItem(self->pending, key) < 0)
        return 0;
    uint64_t begin = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(entry, 1));
    return mark_device(self->markers, begin, PyTuple_GET_ITEM(entry, 3)) ||
           PyDict_SetItem(self->pending, key, entry) < 0;
}

static void after_wait(Method *self, PyObject *work) {
    if (work == self->ring->last_work && end_last(self))
        return;
    if (hand_over(self->ring, self->pending) < 0)
        PyErr_Clear();
    PyObject *key = PyLong_FromVoidPtr(work);
    PyObject *entry = key ? Py_XNewRef(PyDict_GetItemWithError(self->pending, key)) : NULL;
    if (entry && !end_pending(self, key, entry))
        ask(PyObject_CallFunctionObjArgs(self->waited, work, entry, NULL));
    Py_XDECREF(entry);
    Py_XDECREF(key);
    PyErr_Clear();
}

static PyObject *Wait_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    Ring *ring = self->ring;
    if (!self->enabled || PyVectorcall_NARGS(flags) < 1 || !ring->view.obj ||
        (args[0] != ring->last_work && !PyDict_GET_SIZE(self->pending)))
        return PyObject_Vectorcall(self->original, args, flags, names);
    PyObject *work = Py_NewRef(args[0]);
    PyObject *result = PyObject_Vectorcall(self->original, args, flags, names);
    if (!result)
        tell_wait_failure(self, work, PyVectorcall_NARGS(flags) > 1 || names);
    else if (ring->view.obj && self->enabled)
        after_wait(self, work);
    Py_DECREF(work);
    return result;
}

static int check_parts(Method *self) {
    if (PyObject_TypeCheck(self->ring, ring_type) && PyDict_Check(self->pending) &&
        (!self->stacks || PyObject_TypeCheck(self->stacks, stacks_type)) &&
        (!self->markers || PyObject_TypeCheck(self->markers, markers_type)) &&
        (!self->groups || PyDict_Check(self->groups)) && (!self->shapes || PyDict_Check(self->shapes)))
        return 0;
    PyErr_SetString(PyExc_TypeError, "these are not parts of this module");
    return -1;
}

/* Takes what was parsed, and holds it. */
static int take_parts(Method *self, Method *given, vectorcallfunc call) {
    if ((PyObject *)given->stacks == Py_None)
        given->stacks = NULL;
    if ((PyObject *)given->markers == Py_None)
        given->markers = NULL;
    if (check_parts(given) < 0)
        return -1;
    given->enabled = given->direct = 1;
    memcpy(&self->original, &given->original, sizeof(Method) - offsetof(Method, original));
    self->vectorcall = call;
    PyObject *parts[] = {self->original, self->slow, self->failed, self->pending, self->waited, (PyObject *)self->ring,
                         (PyObject *)self->markers, self->groups, self->shapes, self->learn, self->sweep, self->no_work,
                         (PyObject *)self->stacks, (PyObject *)self->layout.type};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        Py_XINCREF(parts[i]);
    return 0;
}

/* Collective(original, slow, failed, pending, ring, markers or None, groups, shapes, learn, sweep, no_work,
 *            stacks or None, op, form, layout), form as in Form, layout = (options_type, value_at, reduce_at, root_at,
 *            timeout_at) */
static int Collective_init(Method *self, PyObject *args, PyObject *kwargs) {
    Method given = {.op = 0};
    Form *form = &given.form;
    Layout *layout = &given.layout;
    if (self->original)
        return -1;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOOOL(iiiiiiii)(O!iiii)", &given.original, &given.slow, &given.failed,
                          &given.pending, &given.ring, &given.markers, &given.groups, &given.shapes, &given.learn,
                          &given.sweep, &given.no_work, &given.stacks, &given.op, &form->count, &form->out, &form->in,
                          &form->out_splits, &form->in_splits, &form->options, &form->peer, &form->tag, &PyType_Type,
                          &layout->type, &layout->value_at, &layout->reduce_at, &layout->root_at, &layout->timeout_at))
        return -1;
    return take_parts(self, &given, Collective_call);
}

/* Batch(original, slow, failed, pending, ring, markers or None, groups, sweep, no_work, stacks or None, op, whether this is
 *       its end) */
static int Batch_init(Method *self, PyObject *args, PyObject *kwargs) {
    Method given = {.op = 0};
    int end;
    if (self->original || !PyArg_ParseTuple(args, "OOOOOOOOOOLp", &given.original, &given.slow, &given.failed,
                                            &given.pending, &given.ring, &given.markers, &given.groups, &given.sweep,
                                            &given.no_work, &given.stacks, &given.op, &end))
        return -1;
    return take_parts(self, &given, end ? End_call : Start_call);
}

/* Wait(original, failed, waited, pending, ring, markers or None) */
static int Wait_init(Method *self, PyObject *args, PyObject *kwargs) {
    Method given = {.op = 0};
    if (self->original || !PyArg_ParseTuple(args, "OOOOOO", &given.original, &given.failed, &given.waited,
                                            &given.pending, &given.ring, &given.markers))
        return -1;
    return take_parts(self, &given, Wait_call);
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

static PyType_Slot Collective_slots[] = METHOD_SLOTS(Collective_init, "A collective of ProcessGroup or Backend, recorded.");
static PyType_Slot Batch_slots[] = METHOD_SLOTS(Batch_init, "The start or the end of a batch, recorded.");
static PyType_Slot Wait_slots[] = METHOD_SLOTS(Wait_init, "Work.wait, recorded.");

enum { METHOD_FLAGS = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR };
static PyType_Spec Collective_spec = {"allranks.recording._fast.Collective", sizeof(Method), 0, METHOD_FLAGS, Collective_slots};
static PyType_Spec Batch_spec = {"allranks.recording._fast.Batch", sizeof(Method), 0, METHOD_FLAGS, Batch_slots};
static PyType_Spec Wait_spec = {"allranks.recording._fast.Wait", sizeof(Method), 0, METHOD_FLAGS, Wait_slots};

/* A method of a proxy (recording_group.py): calls the method of the same name of `self.original`. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *name;
} ForwardMethod;

static PyObject *Forward_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *passed[32];
    if (count < 1 || count > 32 || names) {
        PyErr_SetString(PyExc_TypeError, "C++ calls a proxy with at most 31 arguments");
        return NULL;
    }
    passed[0] = PyObject_GetAttr(args[0], str_original);
    if (!passed[0])
        return NULL;
    memcpy(passed + 1, args + 1, (size_t)(count - 1) * sizeof *args);
    PyObject *result = PyObject_VectorcallMethod(((ForwardMethod *)callable)->name, passed, (size_t)count, NULL);
    Py_DECREF(passed[0]);
    return result;
}

/* Forward(name) */
static int Forward_init(ForwardMethod *self, PyObject *args, PyObject *kwargs) {
    PyObject *name;
    if (self->name || !PyArg_ParseTuple(args, "U", &name))
        return -1;
    self->name = Py_NewRef(name);
    self->vectorcall = Forward_call;
    return 0;
}

static void Forward_dealloc(ForwardMethod *self) {
    Py_XDECREF(self->name);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMemberDef Forward_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(ForwardMethod, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Forward_slots[] = {
    {Py_tp_init, Forward_init},           {Py_tp_dealloc, Forward_dealloc},
    {Py_tp_descr_get, Method_get},        {Py_tp_call, PyVectorcall_Call},
    {Py_tp_members, Forward_members},     {Py_tp_doc, "A method of a proxy."},
    {0, NULL},
};
static PyType_Spec Forward_spec = {"allranks.recording._fast.Forward", sizeof(ForwardMethod), 0, METHOD_FLAGS, Forward_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", "The hot path of the recorder.", -1, NULL};

static PyObject *add_type(PyObject *made, const char *name, PyType_Spec *spec) {
    PyObject *type = made ? PyType_FromSpec(spec) : NULL;
    if (!type || PyModule_AddObject(made, name, Py_NewRef(type)) < 0)
        return NULL;
    return type; /* kept for ever: the checks above compare with it */
}

#ifndef BUILT_FOR
#define BUILT_FOR PY_VERSION
#endif

/* Frames are read in place, so only the Python that this was built for will do: the same 3.x, and exactly the same where
 * one of the two is not a final release. Otherwise the import fails, and nothing is recorded. */
static int is_built_for_this(void) {
    const char *built = BUILT_FOR, *runs = Py_GetVersion(), *unfinished = "abcr+";
    size_t length = strcspn(runs, " "), minor = strcspn(built, ".") + 1;
    minor += strcspn(built + minor, ".") + 1;
    if (strlen(built) != length || strncmp(built, runs, length))
        return !strncmp(built, runs, minor) && !strpbrk(built, unfinished) && strcspn(runs, unfinished) >= length;
    return 1;
}

PyMODINIT_FUNC PyInit__fast(void) {
    if (!is_built_for_this())
        return PyErr_Format(PyExc_ImportError, "built for Python %s", BUILT_FOR);
    PyObject *made = PyModule_Create(&module);
    ring_type = (PyTypeObject *)add_type(made, "Ring", &Ring_spec);
    stacks_type = (PyTypeObject *)add_type(made, "Stacks", &Stacks_spec);
    counters_type = (PyTypeObject *)add_type(made, "Counters", &Counters_spec);
    markers_type = (PyTypeObject *)add_type(made, "Markers", &Markers_spec);
    str_shape = PyUnicode_InternFromString("shape");
    str_dtype = PyUnicode_InternFromString("dtype");
    str_is_cpu = PyUnicode_InternFromString("is_cpu");
    str_original = PyUnicode_InternFromString("original");
    str_opts = PyUnicode_InternFromString("opts");
    no_parts = PyTuple_New(0);
    if (!ring_type || !stacks_type || !counters_type || !markers_type || !str_shape || !str_dtype || !str_is_cpu ||
        !str_original || !str_opts || !no_parts || PyModule_AddIntConstant(made, "VERSION", 6) < 0 || !add_type(made, "Collective", &Collective_spec) ||
        !add_type(made, "Batch", &Batch_spec) || !add_type(made, "Wait", &Wait_spec) || !add_type(made, "Forward", &Forward_spec))
        return NULL;
    return made;
}
