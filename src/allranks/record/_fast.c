/* The hot path of the recorder in C: writes rows, notes their end, finds stacks. Plain CPython API, no torch.
 *
 * Optional: `hook.py`, `writer.py` and `stack.py` do the same in Python, some ten microseconds slower, and are used
 * when this module was not built. Both write the same bytes; tests/record runs the same tests over both.
 *
 * Ring   begin(...) fills a row in ascending order, `begin` first and `end` last, with release fences in between, so
 *        that a reader in another process never takes a half-written row for whole, on any CPU.
 * Stacks capture(frame) looks a stack up by its code objects and instructions.
 * Counters numbers the calls of one process group.
 * Collective, Wait  stand in for methods of ProcessGroup and Work in their most frequent form, and hand every other
 *        form to the wrapper written in Python. They hold the GIL throughout, except inside torch.
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
enum { SCHEDULED = 0, STARTED = 1, COMPLETED = 2 };
enum { RETIRED = 8 };

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

/* Puts the call made last among the others, as (work, number, group, no parts) under the identity of the work. */
static int hand_over(Ring *self, PyObject *pending) {
    PyObject *work = self->last_work, *group = self->last_group;
    if (!work)
        return 0;
    self->last_work = self->last_group = NULL;
    PyObject *key = PyLong_FromVoidPtr(work), *number = PyLong_FromUnsignedLongLong(self->last_begin);
    PyObject *entry = key && number ? PyTuple_Pack(4, work, number, group, no_parts) : NULL;
    int failed = !entry || PyDict_SetItem(pending, key, entry) < 0;
    Py_XDECREF(entry);
    Py_XDECREF(number);
    Py_XDECREF(key);
    Py_DECREF(work);
    Py_DECREF(group);
    return failed ? -1 : 0;
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

static PyType_Spec Ring_spec = {"allranks.record._fast.Ring", sizeof(Ring), 0, Py_TPFLAGS_DEFAULT, Ring_slots};

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

enum { MAX_WALK = 96, LIBRARY_FRAMES = 3, MAX_CODES = 8192 }; /* as in stack.py */
enum { PLUMBING, LIBRARY, USER };

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
    PyObject *plumbing_starts, *plumbing_ends, *library_starts; /* tuples of str: how a file name begins or ends */
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

/* Stacks(depth, main_thread_ident, plumbing_starts, plumbing_ends, library_starts) */
static int Stacks_init(Stacks *self, PyObject *args, PyObject *kwargs) {
    PyObject *starts, *ends, *library;
    unsigned long ident;
    int depth;
    if (!PyArg_ParseTuple(args, "ikO!O!O!", &depth, &ident, &PyTuple_Type, &starts, &PyTuple_Type, &ends, &PyTuple_Type,
                          &library))
        return -1;
    if (self->kinds.slots) {
        PyErr_SetString(PyExc_ValueError, "already open");
        return -1;
    }
    self->plumbing_starts = Py_NewRef(starts);
    self->plumbing_ends = Py_NewRef(ends);
    self->library_starts = Py_NewRef(library);
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

/* The kind of a code object, worked out once. Runs no Python code, so that no other thread moves meanwhile.
 * A full table leaves out what is new. */
static long kind_of(Stacks *self, PyCodeObject *code) {
    Slot *slot = slot_of(&self->kinds, (uint64_t)(uintptr_t)code);
    if (slot->key)
        return slot->value;
    PyObject *name = code->co_filename;
    long kind = touches(name, self->plumbing_starts, -1) || touches(name, self->plumbing_ends, +1) ? PLUMBING
                : touches(name, self->library_starts, -1)                                          ? LIBRARY
                                                                                                   : USER;
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

/* A hash of the frames that are kept of the stack that starts here, by code object and instruction; 0 when none is.
 * 64 bits are taken for the stack itself: two of 20,000 stacks share one with a probability of 1e-11. */
static uint64_t key_of(Stacks *self, Frame frame) {
    int left = self->depth, library = LIBRARY_FRAMES, walked = MAX_WALK;
    uint64_t hash = 0;
    while (frame && left && walked--) {
        PyCodeObject *code = code_of(frame);
        long kind = kind_of(self, code);
        if (kind == USER || (kind == LIBRARY && library)) {
            library -= kind == LIBRARY;
            left--;
            hash = mixed(mixed(hash, (uint64_t)(uintptr_t)code), place_in(frame));
        }
        frame = outer(frame);
    }
    drop(frame);
    return left == self->depth ? 0 : hash > 1 ? hash : 2;
}

static long id_of(Stacks *self, uint64_t key) {
    Slot *slot = key ? slot_of(&self->stacks, key) : NULL;
    return !slot ? 0 : slot->key ? slot->value : -1;
}

/* The id of the stack of this call; 0 when there is none, -1 when it is new. */
static long find_stack(Stacks *self) {
    PyThreadState *here = PyThreadState_Get();
    uint64_t key = key_of(self, innermost(here));
    if (!key && self->main && here != self->main)
        key = key_of(self, innermost(self->main));
    return id_of(self, key);
}

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

static PyType_Spec Stacks_spec = {"allranks.record._fast.Stacks", sizeof(Stacks), 0, Py_TPFLAGS_DEFAULT, Stacks_slots};

/* ---- Counters ------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    long long number, seq, p2p_seq, op_id, timeout_ms;
    char blocking;
    PyObject *batch; /* numbers of the open coalesced group, or None */
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
    Py_XSETREF(self->batch, Py_NewRef(Py_None));
    Py_XSETREF(self->ranks, Py_NewRef(ranks));
    Py_XSETREF(self->cpu_side, Py_NewRef(Py_None));
    return 0;
}

static void Counters_dealloc(Counters *self) {
    Py_XDECREF(self->batch);
    Py_XDECREF(self->ranks);
    Py_XDECREF(self->cpu_side);
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
    {"cpu_side", T_OBJECT, offsetof(Counters, cpu_side), 0, "Stand for calls on CPU tensors, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Counters_slots[] = {
    {Py_tp_init, Counters_init},       {Py_tp_dealloc, Counters_dealloc},
    {Py_tp_methods, Counters_methods}, {Py_tp_members, Counters_members},
    {Py_tp_doc, "Numbers of one process group's calls."}, {0, NULL},
};

static PyType_Spec Counters_spec = {
    "allranks.record._fast.Counters", sizeof(Counters), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, Counters_slots};

/* ---- Collective, Wait and Forward ---------------------------------------------------------------------------- */

static PyTypeObject *ring_type, *stacks_type, *counters_type;
static PyObject *str_shape, *str_dtype, *str_is_cpu, *str_original;

enum { NOWHERE = -1, SWEEP_NS = 1000000 /* between two looks at the calls under way; as in writer.py */ };

/* Where an options object of torch keeps its fields: the address of the C++ value stands at `value_at` in the Python
 * object, the fields at these places in the value (inplace.py finds them and tries them out). NOWHERE: it has none. */
typedef struct {
    PyTypeObject *type;
    int value_at, reduce_at, root_at, timeout_at;
} Layout;

/* A recorded method of torch: `original` is torch's function, `slow` the wrapper in Python, `failed` is told of an
 * error of `original`. The fields from `groups` on are not used by Wait. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *original, *slow, *failed, *pending;
    Ring *ring;
    PyObject *groups, *shapes, *sweep, *no_work;
    Stacks *stacks; /* NULL: no stacks */
    Layout layout;
    long long op;
    char moved; /* takes (output, input, options), not ([tensor], options) */
    char enabled, direct;
} Method;

static void Method_dealloc(Method *self) {
    Py_XDECREF(self->original);
    Py_XDECREF(self->slow);
    Py_XDECREF(self->failed);
    Py_XDECREF(self->pending);
    Py_XDECREF(self->ring);
    Py_XDECREF(self->groups);
    Py_XDECREF(self->shapes);
    Py_XDECREF(self->sweep);
    Py_XDECREF(self->no_work);
    Py_XDECREF(self->stacks);
    Py_XDECREF(self->layout.type);
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

/* Tells `failed(number, error)` of the exception that is set, and sets it again. */
static void tell_failure(Method *self, unsigned long long number) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    ask(PyObject_CallFunction(self->failed, "KO", number, error ? error : Py_None));
    PyErr_Restore(kind, error, trace);
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
        return 0; /* a timeout of its own */
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
        call->root = PyLong_AsLongLong(PyTuple_GET_ITEM(group->ranks, root));
    }
    return 1;
}

/* The tensors of a call as the key of their sizes and dtypes; NULL when these are not the arguments we know. */
static PyObject *key_of_tensors(const Method *self, PyObject *const *args) {
    PyObject *first = args[1], *second = NULL;
    if (self->moved)
        second = args[2];
    else if (PyList_CheckExact(first) && PyList_GET_SIZE(first) == 1)
        first = PyList_GET_ITEM(first, 0);
    else
        return NULL;
    Py_INCREF(first); /* a tensor of the user's own class may run Python code and change the list */
    PyObject *parts[4] = {PyObject_GetAttr(first, str_shape), PyObject_GetAttr(first, str_dtype), NULL, NULL};
    int count = 2, whole = parts[0] && parts[1];
    Py_DECREF(first);
    if (second && whole) {
        parts[2] = PyObject_GetAttr(second, str_shape);
        parts[3] = PyObject_GetAttr(second, str_dtype);
        count = 4;
        whole = parts[2] && parts[3];
    }
    PyObject *key = whole ? PyTuple_New(count) : NULL;
    for (int i = 0; i < count; i++)
        if (key)
            PyTuple_SET_ITEM(key, i, parts[i]);
        else
            Py_XDECREF(parts[i]);
    return key;
}

/* What is known of a call before it is made; 0 with no exception left: use `slow`. */
static int describe(Method *self, Counters *group, PyObject *const *args, Call *call) {
    if (!read_options(&self->layout, args[self->moved ? 3 : 2], group, call))
        return 0;
    PyObject *key = key_of_tensors(self, args);
    PyObject *known = key ? PyDict_GetItemWithError(self->shapes, key) : NULL;
    int fine = known && read_shapes(known, call) == 0;
    Py_XDECREF(key);
    PyErr_Clear();
    call->stack = fine && self->stacks ? find_stack(self->stacks) : 0;
    return fine && call->stack >= 0;
}

/* The counters of a group that Python has met and that stands in no coalesced batch; else NULL. */
static Counters *known_group(Method *self, PyObject *group) {
    PyObject *key = PyLong_FromVoidPtr(group);
    PyObject *found = key ? PyDict_GetItemWithError(self->groups, key) : NULL;
    Py_XDECREF(key);
    PyErr_Clear();
    if (!found || !PyObject_TypeCheck(found, counters_type) || ((Counters *)found)->batch != Py_None)
        return NULL;
    return (Counters *)Py_NewRef(found);
}

/* Which side of the group this call went to: in one with several backends the tensor decides. Borrowed. */
static Counters *side_of(Counters *group, PyObject *tensors) {
    if (!PyObject_TypeCheck(group->cpu_side, counters_type))
        return group;
    PyObject *tensor = PyList_CheckExact(tensors) && PyList_GET_SIZE(tensors) ? PyList_GET_ITEM(tensors, 0) : tensors;
    Py_INCREF(tensor);
    PyObject *answer = PyObject_GetAttr(tensor, str_is_cpu);
    int on_cpu = answer == Py_True;
    Py_DECREF(tensor);
    ask(answer);
    return on_cpu ? (Counters *)group->cpu_side : group;
}

/* The library has answered. Other calls may have ended meanwhile: they are looked at once in a while. */
static void follow(Method *self, Counters *group, PyObject *work, uint64_t begin) {
    Ring *ring = self->ring;
    if (work == Py_None) { /* over, or queued on the device: Python knows how to follow it */
        ask(PyObject_CallFunction(self->no_work, "KO", (unsigned long long)begin, (PyObject *)group));
        return;
    }
    int64_t now = now_ns();
    if (group->blocking)
        mark_started(ring, begin, now);
    if (hand_over(ring, self->pending) < 0)
        PyErr_Clear();
    ring->last_work = Py_NewRef(work);
    ring->last_group = Py_NewRef((PyObject *)group);
    ring->last_begin = begin;
    if (PyDict_GET_SIZE(self->pending) && now - ring->swept_ns > SWEEP_NS) {
        ring->swept_ns = now;
        ask(PyObject_CallNoArgs(self->sweep));
    }
}

static PyObject *Collective_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    if (!self->enabled)
        return PyObject_Vectorcall(self->original, args, flags, names);
    Call call = {.op = self->op, .root = -1, .peer = -1, .tag = -1};
    int usual = self->direct && !names && PyVectorcall_NARGS(flags) == (self->moved ? 4 : 3) && self->ring->view.obj;
    Counters *group = usual ? known_group(self, args[0]) : NULL;
    if (!group || !describe(self, group, args, &call)) {
        Py_XDECREF(group);
        return PyObject_Vectorcall(self->slow, args, flags, names);
    }
    native_thread(self->ring);
    call.group = group->number;
    call.timeout_ms = group->timeout_ms;
    call.seq = ++group->seq;
    call.op_id = ++group->op_id;
    uint64_t begin = write_row(self->ring, &call);
    PyObject *work = PyObject_Vectorcall(self->original, args, flags, names);
    if (!work)
        tell_failure(self, begin);
    else if (self->ring->view.obj)
        follow(self, side_of(group, args[1]), work, begin);
    Py_DECREF(group);
    return work;
}

/* The program's wait() for the call made last, which is not among the others: it ends here. */
static PyObject *wait_for_last(Method *self, PyObject *const *args, size_t flags, PyObject *names) {
    Ring *ring = self->ring;
    uint64_t begin = ring->last_begin;
    PyObject *work = ring->last_work;
    ring->last_work = NULL;
    Py_CLEAR(ring->last_group);
    PyObject *result = PyObject_Vectorcall(self->original, args, flags, names);
    if (!result)
        tell_failure(self, begin);
    else if (ring->view.obj)
        mark_finished(ring, begin, COMPLETED, 1);
    Py_DECREF(work);
    return result;
}

static PyObject *Wait_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    if (!self->enabled || PyVectorcall_NARGS(flags) < 1 || !self->ring->view.obj)
        return PyObject_Vectorcall(self->original, args, flags, names);
    if (args[0] == self->ring->last_work) {
        int limited = PyVectorcall_NARGS(flags) > 1 || names; /* the call may go on after its time is over */
        if (((Counters *)self->ring->last_group)->blocking && !limited)
            return wait_for_last(self, args, flags, names);
        if (hand_over(self->ring, self->pending) < 0)
            PyErr_Clear();
    }
    return PyObject_Vectorcall(PyDict_GET_SIZE(self->pending) ? self->slow : self->original, args, flags, names);
}

static int check_parts(Method *self) {
    if (PyObject_TypeCheck(self->ring, ring_type) && PyDict_Check(self->pending) &&
        (!self->stacks || PyObject_TypeCheck(self->stacks, stacks_type)) &&
        (!self->groups || PyDict_Check(self->groups)) && (!self->shapes || PyDict_Check(self->shapes)))
        return 0;
    PyErr_SetString(PyExc_TypeError, "these are not parts of this module");
    return -1;
}

/* Takes what was parsed, and holds it. */
static int take_parts(Method *self, Method *given, vectorcallfunc call) {
    if (check_parts(given) < 0)
        return -1;
    given->enabled = given->direct = 1;
    memcpy(&self->original, &given->original, sizeof(Method) - offsetof(Method, original));
    self->vectorcall = call;
    Py_INCREF(self->original);
    Py_INCREF(self->slow);
    Py_INCREF(self->failed);
    Py_INCREF(self->pending);
    Py_INCREF(self->ring);
    Py_XINCREF(self->groups);
    Py_XINCREF(self->shapes);
    Py_XINCREF(self->sweep);
    Py_XINCREF(self->no_work);
    Py_XINCREF(self->stacks);
    Py_XINCREF(self->layout.type);
    return 0;
}

/* Collective(original, slow, failed, pending, ring, groups, shapes, sweep, no_work, stacks or None, op, moved, layout),
 * layout = (options_type, value_at, reduce_at, root_at, timeout_at) */
static int Collective_init(Method *self, PyObject *args, PyObject *kwargs) {
    Method given = {.op = 0};
    int moved;
    if (self->original)
        return -1;
    if (!PyArg_ParseTuple(args, "OOOOOOOOOOLp(O!iiii)", &given.original, &given.slow, &given.failed, &given.pending,
                          &given.ring, &given.groups, &given.shapes, &given.sweep, &given.no_work, &given.stacks,
                          &given.op, &moved, &PyType_Type, &given.layout.type, &given.layout.value_at,
                          &given.layout.reduce_at, &given.layout.root_at, &given.layout.timeout_at))
        return -1;
    if ((PyObject *)given.stacks == Py_None)
        given.stacks = NULL;
    given.moved = (char)moved;
    return take_parts(self, &given, Collective_call);
}

/* Wait(original, slow, failed, pending, ring) */
static int Wait_init(Method *self, PyObject *args, PyObject *kwargs) {
    Method given = {.op = 0};
    if (self->original || !PyArg_ParseTuple(args, "OOOOO", &given.original, &given.slow, &given.failed, &given.pending,
                                            &given.ring))
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
static PyType_Slot Wait_slots[] = METHOD_SLOTS(Wait_init, "Work.wait, recorded.");

enum { METHOD_FLAGS = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR };
static PyType_Spec Collective_spec = {"allranks.record._fast.Collective", sizeof(Method), 0, METHOD_FLAGS, Collective_slots};
static PyType_Spec Wait_spec = {"allranks.record._fast.Wait", sizeof(Method), 0, METHOD_FLAGS, Wait_slots};

/* A method of a proxy (recording_group.py): calls the method of the same name of `self.original`. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *name;
} ForwardMethod;

static PyObject *Forward_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *passed[8];
    if (count < 1 || count > 8 || names) {
        PyErr_SetString(PyExc_TypeError, "C++ calls a proxy with at most 7 arguments");
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
static PyType_Spec Forward_spec = {"allranks.record._fast.Forward", sizeof(ForwardMethod), 0, METHOD_FLAGS, Forward_slots};

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
    str_is_cpu = PyUnicode_InternFromString("is_cpu");
    str_original = PyUnicode_InternFromString("original");
    no_parts = PyTuple_New(0);
    if (!ring_type || !stacks_type || !counters_type || !str_shape || !str_dtype || !str_is_cpu || !str_original || !no_parts ||
        PyModule_AddIntConstant(made, "VERSION", 4) < 0 || !add_type(made, "Collective", &Collective_spec) ||
        !add_type(made, "Wait", &Wait_spec) || !add_type(made, "Forward", &Forward_spec))
        return NULL;
    return made;
}
