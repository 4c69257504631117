/* The hot path of the recorder in C: follows every call until it completes, and looks up stacks. Plain CPython API,
 * no torch.
 *
 * Counters numbers the calls of one process group.
 * Ring   fills a row in ascending order, `begin` first and `end` last, with release fences in between, so that a reader in
 *        another process never takes a half-written row for whole, on any CPU.
 * Stacks looks a stack up by its code objects and instructions.
 * Markers records CUDA events after calls without a Work, and queries which of them the device has passed.
 * Method replaces a method of ProcessGroup or Work. It reads a call in its most frequent form, and calls Python for any
 *        other form. It holds the GIL, except inside torch.
 *
 * Other threads and processes run between two calls and leave the caches cold, so the number of cache lines that a call
 * touches matters more than the number of instructions.
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
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { HEADER_BYTES = 4096, ROW_BYTES = 136 };
enum { SCHEDULED = 0, STARTED = 1, COMPLETED = 2, FAILED = 3 };
enum { P2P = 1, PART = 2, BATCH_END = 4, RETIRED = 8, CAPTURED = 16 }; /* as Flag of model/trace.py */

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

/* The mapped files of the rings. If a file is truncated or its disk fails, the next store into it raises SIGBUS. The mapping is
 * then replaced by anonymous memory, and the rank continues. Any other SIGBUS goes to the previous handler. */
enum { MAPPED = 8 };
static struct {
    char *_Atomic start;
    size_t size;
} mapped[MAPPED];
static struct sigaction bus_before;

static int is_lost(char *start, size_t size) { /* faulthandler raises the signal again, without the address */
    char last;
    struct { void *base; size_t len; } here = {&last, 1}, there = {start + size - 1, 1}; /* struct iovec */
    return syscall(SYS_process_vm_readv, getpid(), &here, 1, &there, 1, 0) < 0 && errno == EFAULT;
}

static void on_bus_error(int number, siginfo_t *info, void *unused) {
    int found = 0, known = errno;
    for (int i = 0; i < MAPPED; i++) {
        char *start = mapped[i].start, *at = info->si_addr;
        int inside = start && info->si_code > 0 && at >= start && at < start + mapped[i].size;
        if (start && (inside || is_lost(start, mapped[i].size)))
            found |= mmap(start, mapped[i].size, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) ==
                     start;
    }
    if (!found) {
        sigaction(SIGBUS, &bus_before, NULL);
        raise(number); /* it comes when we return */
    }
    errno = known;
}

static void keep_mapped(char *start, size_t size) {
    static int installed;
    struct sigaction ours = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_ONSTACK};
    for (int i = 0; i < MAPPED; i++)
        if (!mapped[i].start) {
            mapped[i].size = size;
            mapped[i].start = start;
            break;
        }
    if (!installed)
        installed = !sigaction(SIGBUS, &ours, &bus_before);
}

static void forget_mapped(char *start) {
    for (int i = 0; i < MAPPED; i++)
        if (mapped[i].start == start)
            mapped[i].start = NULL;
}

/* For intervals: the wall clock jumps when it is set. */
static int64_t ticking_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static PyTypeObject *ring_type, *stacks_type, *counters_type, *markers_type, *recording_type;
static PyObject *no_parts; /* () */
static PyObject *str_shape, *str_dtype, *str_is_cpu, *str_is_completed, *str_opts;
static int rings; /* created so far: a forked child that records creates its own, and reads its thread id again */
static _Thread_local uint32_t thread_id;
static _Thread_local int thread_asked;

typedef struct {
    long long group, op, shapes, in_numel, out_numel, stack, seq, p2p_seq, op_id, timeout_ms, reduce_op, root, peer, flags, tag;
} Call;

/* ---- Counters ------------------------------------------------------------------------------------------------ */

typedef struct {
    PyObject_HEAD
    long long number, seq, p2p_seq, op_id, timeout_ms;
    char blocking;
    long long batch_seq, batch_p2p; /* numbers of the open batch; 0: not assigned yet */
    PyObject *parts; /* list: numbers of the calls in the open batch; NULL: none is open */
    PyObject *ranks; /* tuple: global ranks in group order */
    PyObject *cpu_side; /* Counters for calls on CPU tensors if these have their own backend, or None */
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

/* Assigns the numbers of the next call. Calls of one batch share one p2p and one collective number. */
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

static void add_part(Counters *self, uint64_t begin) {
    PyObject *number = PyLong_FromUnsignedLongLong(begin);
    if (!number || PyList_Append(self->parts, number) < 0)
        PyErr_Clear();
    Py_XDECREF(number);
}

/* Starts a batch: the following calls are its parts. */
static int open_batch(Counters *self) {
    PyObject *parts = PyList_New(0);
    if (!parts)
        return -1;
    self->batch_seq = self->batch_p2p = 0;
    Py_XSETREF(self->parts, parts);
    return 0;
}

/* Assigns the numbers of the open batch and ends it; returns a tuple of its calls' numbers, or NULL with an exception. */
static PyObject *close_batch(Counters *self, Call *call) {
    PyObject *list = self->parts; /* a new tuple may run finalizers, and other threads with them */
    self->parts = NULL;
    PyObject *parts = list ? PyList_AsTuple(list) : Py_NewRef(no_parts);
    Py_XDECREF(list);
    if (!parts)
        return NULL;
    call->seq = self->batch_seq ? self->batch_seq : self->seq;
    call->p2p_seq = self->batch_p2p;
    call->op_id = ++self->op_id;
    call->flags = BATCH_END | (call->p2p_seq ? P2P : 0);
    self->batch_seq = self->batch_p2p = 0;
    return parts;
}

static PyMemberDef Counters_members[] = {
    {"number", T_LONGLONG, offsetof(Counters, number), READONLY, "Id of the group in the black box."},
    {"timeout_ms", T_LONGLONG, offsetof(Counters, timeout_ms), 0, "Timeout of the group; 0 unknown."},
    {"blocking", T_BOOL, offsetof(Counters, blocking), READONLY, "wait() returns when the call is over."},
    {"cpu_side", T_OBJECT, offsetof(Counters, cpu_side), 0, "Stand for calls on CPU tensors, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Counters_slots[] = {
    {Py_tp_init, Counters_init},       {Py_tp_dealloc, Counters_dealloc},
    {Py_tp_members, Counters_members}, {Py_tp_doc, "Numbers of one process group's calls."},
    {0, NULL},
};

static PyType_Spec Counters_spec = {
    "allranks.recording._fast.Counters", sizeof(Counters), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, Counters_slots};

/* ---- Ring ---------------------------------------------------------------------------------------------------- */

/* A pending call: its work, the counters of its group, the numbers of the calls that end with it, and its own. */
typedef struct {
    PyObject *work, *group, *parts; /* NULL: none */
    uint64_t begin;
} Entry;

static void drop_entry(Entry entry) {
    Py_XDECREF(entry.work);
    Py_XDECREF(entry.group);
    Py_XDECREF(entry.parts);
}

typedef struct {
    PyObject_HEAD
    Py_buffer view;
    uint64_t capacity, next, done;
    int64_t swept_ns; /* time of the last sweep of pending calls */
    Entry last; /* the last call: most are waited for immediately and need no dict entry */
    long long step;
    unsigned long label;
    int next_field, calls_field, last_field, done_field; /* indices of eight-byte header fields */
    int capturing; /* CUDA graphs being captured: no event may be recorded or queried */
    PyObject *on_thread; /* called with the id of a thread at its first call; may be NULL or None */
} Ring;

/* Called before a call gets its numbers: for a new thread it runs Python code, and other threads may run meanwhile. */
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
    keep_mapped(self->view.buf, (size_t)self->view.len);
    rings++;
    self->capacity = capacity;
    self->next = self->done = 0;
    self->swept_ns = 0;
    self->step = -1;
    self->label = 0;
    return 0;
}

static void let_go(Ring *self) {
    if (!self->view.obj)
        return;
    forget_mapped(self->view.buf);
    PyBuffer_Release(&self->view);
}

static void Ring_dealloc(Ring *self) {
    drop_entry(self->last);
    Py_XDECREF(self->on_thread);
    let_go(self);
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

/* The number of the call; 0 if the ring was closed meanwhile. */
static uint64_t write_row(Ring *self, const Call *call) {
    uint32_t thread = native_thread(self);
    if (!self->view.obj)
        return 0;
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

/* Assigns the numbers of a call and writes its row. */
static uint64_t begin_call(Ring *self, Counters *group, int p2p, Call *call) {
    native_thread(self);
    call->group = group->number;
    if (!call->timeout_ms)
        call->timeout_ms = group->timeout_ms;
    draw_numbers(group, p2p, call);
    if (self->capturing && !group->blocking)
        call->flags |= CAPTURED;
    uint64_t begin = write_row(self, call);
    if (begin && call->flags & PART)
        add_part(group, begin);
    return begin;
}

/* begin(counters, op, (shapes, elements in, elements out), stack, p2p, timeout_ms, reduce_op, root, peer, tag) -> its number */
static PyObject *Ring_begin(Ring *self, PyObject *args) {
    Call call;
    Counters *group;
    int p2p;
    if (!PyArg_ParseTuple(args, "O!L(LLL)LpLLLLL", counters_type, &group, &call.op, &call.shapes, &call.in_numel,
                          &call.out_numel, &call.stack, &p2p, &call.timeout_ms, &call.reduce_op, &call.root, &call.peer,
                          &call.tag))
        return NULL;
    uint64_t begin = begin_call(self, group, p2p, &call);
    if (!begin)
        return PyErr_Format(PyExc_ValueError, "the ring is closed");
    return PyLong_FromUnsignedLongLong(begin);
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

/* started(begin): the library has accepted the call. */
static PyObject *Ring_started(Ring *self, PyObject *argument) {
    uint64_t begin = PyLong_AsUnsignedLongLong(argument);
    if (PyErr_Occurred())
        return NULL;
    if (begin && self->view.obj)
        mark_started(self, begin, now_ns());
    Py_RETURN_NONE;
}

static void finish_with_parts(Ring *ring, uint64_t begin, PyObject *parts, int state) {
    mark_finished(ring, begin, state, 1);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(parts); i++) /* parts are not counted separately */
        mark_finished(ring, PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(parts, i)), state, 0);
}

/* finish(begin, state, parts): the call and its parts have ended. Does nothing for a row that was overwritten. */
static PyObject *Ring_finish(Ring *self, PyObject *args) {
    unsigned long long begin;
    int state;
    PyObject *parts = no_parts;
    if (!PyArg_ParseTuple(args, "Ki|O!", &begin, &state, &PyTuple_Type, &parts))
        return NULL;
    if (begin == 0 || !self->view.obj) {
        PyErr_SetString(PyExc_ValueError, "no such record");
        return NULL;
    }
    finish_with_parts(self, begin, parts, state);
    Py_RETURN_NONE;
}

static PyObject *Ring_set_step(Ring *self, PyObject *args) {
    if (!PyArg_ParseTuple(args, "Lk", &self->step, &self->label))
        return NULL;
    Py_RETURN_NONE;
}

/* Adds a call to `pending`, as (work, number, group, parts) by the id of the work; consumes the entry. */
static void keep(PyObject *pending, Entry entry) {
    PyObject *key = PyLong_FromVoidPtr(entry.work), *number = PyLong_FromUnsignedLongLong(entry.begin);
    PyObject *kept = key && number ? PyTuple_Pack(4, entry.work, number, entry.group, entry.parts) : NULL;
    if (!kept || PyDict_SetItem(pending, key, kept) < 0)
        PyErr_Clear();
    Py_XDECREF(kept);
    Py_XDECREF(number);
    Py_XDECREF(key);
    drop_entry(entry);
}

/* The same for the last call. */
static void hand_over(Ring *self, PyObject *pending) {
    Entry last = self->last;
    self->last = (Entry){NULL, NULL, NULL, 0};
    if (last.work)
        keep(pending, last);
}

static PyObject *Ring_hand_over(Ring *self, PyObject *pending) {
    if (!PyDict_Check(pending)) {
        PyErr_SetString(PyExc_TypeError, "calls under way are kept in a dict");
        return NULL;
    }
    hand_over(self, pending);
    Py_RETURN_NONE;
}

static PyObject *Ring_release(Ring *self, PyObject *unused) {
    let_go(self);
    Py_RETURN_NONE;
}

static PyMethodDef Ring_methods[] = {
    {"begin", (PyCFunction)Ring_begin, METH_VARARGS, "Writes the row of a call; returns its number."},
    {"started", (PyCFunction)Ring_started, METH_O, "The library has taken the call."},
    {"finish", (PyCFunction)Ring_finish, METH_VARARGS, "The call and its parts are over, in this state."},
    {"set_step", (PyCFunction)Ring_set_step, METH_VARARGS, "The step and label of the calls from now on."},
    {"hand_over", (PyCFunction)Ring_hand_over, METH_O, "Puts the call made last among those under way."},
    {"release", (PyCFunction)Ring_release, METH_NOARGS, "Lets go of the memory."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef Ring_members[] = {
    {"on_thread", T_OBJECT, offsetof(Ring, on_thread), 0, "Called with the id of a thread at its first call, or None."},
    {"capturing", T_INT, offsetof(Ring, capturing), 0, "CUDA graphs that are being captured."},
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

/* Python creates frame objects only on request. If the layout of its internal frames is known, they are read in place,
 * which allocates nothing and touches one cache line per frame instead of four. Other versions use the public API, which
 * holds a reference to the current frame. */
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
static int line_of(Frame frame, PyCodeObject *code) {
    return PyCode_Addr2Line(code, _PyInterpreterFrame_LASTI(frame) * (int)sizeof(_Py_CODEUNIT));
}

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
static int line_of(Frame frame, PyCodeObject *code) { return PyFrame_GetLineNumber(frame); }

static Frame outer(Frame frame) {
    Frame back = PyFrame_GetBack(frame);
    Py_DECREF(frame);
    return back;
}

static PyCodeObject *code_of(Frame frame) {
    PyCodeObject *code = PyFrame_GetCode(frame);
    Py_DECREF(code); /* the frame holds a reference */
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

enum { MAX_WALK = 256, LIBRARY_FRAMES = 3, MAX_CODES = 8192 };
/* LIBRARY_FRAMES: innermost library frames kept, which show the feature that made the call */
enum { PLUMBING, LIBRARY, USER, THREAD_START };

/* A hash table for code objects with their kind, and for stacks with their id. It starts small, so that the stacks of a
 * training loop share a few cache lines, and is at most half full. */
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
    PyThreadState *main; /* used for the stack of a call on a thread of C++; may be NULL */
    int depth;
    Table kinds;  /* address of a code object, which is kept alive -> kind */
    Table stacks; /* hash of a stack -> id */
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
    if (table_put(&self->kinds, 1, PLUMBING) < 0 || table_put(&self->stacks, 1, 0) < 0) { /* allocates */
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

/* The kind of a code object, computed once. Runs no Python code, so that no other thread runs meanwhile. A full table
 * ignores new entries. */
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
    int left, library, users; /* frames that may still be kept, of these library frames; user frames seen */
    int from_python;          /* the thread was started by Python's threading, so the main thread is not its caller */
    PyObject *kept;           /* list for (code object, line) of the kept frames; NULL: compute only the hash */
} Walk;

static void add_frame(PyObject *kept, PyCodeObject *code, int line) {
    PyObject *pair = Py_BuildValue("Oi", code, line < 0 ? 0 : line);
    if (!pair || PyList_Append(kept, pair) < 0)
        PyErr_Clear();
    Py_XDECREF(pair);
}

static void walk(Stacks *self, Frame frame, Walk *seen) {
    for (int walked = MAX_WALK; frame && seen->left && walked; walked--) {
        PyCodeObject *code = code_of(frame);
        long kind = kind_of(self, code);
        if (kind == USER || (kind == LIBRARY && seen->library)) {
            seen->library -= kind == LIBRARY;
            seen->users += kind == USER;
            seen->left--;
            seen->hash = mixed(mixed(seen->hash, (uint64_t)(uintptr_t)code), place_in(frame));
            if (seen->kept)
                add_frame(seen->kept, code, line_of(frame, code));
        }
        seen->from_python |= kind == THREAD_START;
        frame = outer(frame);
    }
    drop(frame);
}

/* A hash of the kept frames of the stack that starts here, by code object and instruction; 0 if there are none. On a thread
 * of C++ (autograd's) the user's line is in the main thread, which waits in backward(): its frames are appended. The hash
 * identifies the stack: the probability of a collision among 20,000 stacks is 1e-11. */
static uint64_t key_of(Stacks *self, Frame frame, PyObject *kept) {
    Walk seen = {.left = self->depth, .library = LIBRARY_FRAMES, .kept = kept};
    walk(self, frame, &seen);
    if (!seen.users && !seen.from_python && self->main && PyThreadState_Get() != self->main)
        walk(self, innermost(self->main), &seen);
    return seen.left == self->depth ? 0 : seen.hash > 1 ? seen.hash : 2;
}

static long id_of(Stacks *self, uint64_t key) {
    Slot *slot = key ? slot_of(&self->stacks, key) : NULL;
    return !slot ? 0 : slot->key ? slot->value : -1;
}

/* The id of the stack of this call; 0 without a stack, -1 if it is new. */
static long find_stack(Stacks *self) { return id_of(self, key_of(self, innermost(PyThreadState_Get()), NULL)); }

/* capture(frame) -> id; 0 without kept frames, -1 if the stack is new. */
static PyObject *Stacks_capture(Stacks *self, PyObject *frame) {
    return PyLong_FromLong(PyFrame_Check(frame) ? id_of(self, key_of(self, frame_of(frame), NULL)) : 0);
}

/* frames(frame) -> [(code object, line), ...] of the kept frames, innermost first. */
static PyObject *Stacks_frames(Stacks *self, PyObject *frame) {
    PyObject *kept = PyList_New(0);
    if (kept && PyFrame_Check(frame))
        key_of(self, frame_of(frame), kept);
    return kept;
}

/* remember(frame, id): sets the id of the stack that starts here. */
static PyObject *Stacks_remember(Stacks *self, PyObject *args) {
    PyObject *frame;
    long id;
    if (!PyArg_ParseTuple(args, "O!l", &PyFrame_Type, &frame, &id))
        return NULL;
    uint64_t key = key_of(self, frame_of(frame), NULL);
    if (key && table_put(&self->stacks, key, id) < 0)
        return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyMethodDef Stacks_methods[] = {
    {"capture", (PyCFunction)Stacks_capture, METH_O, "The id of the stack at this frame; -1 when it is new."},
    {"frames", (PyCFunction)Stacks_frames, METH_O, "The frames of a stack that are kept."},
    {"remember", (PyCFunction)Stacks_remember, METH_VARARGS, "Gives a stack its id."},
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

/* ---- Markers ------------------------------------------------------------------------------------------------- */

/* A call of NCCL without a Work, or whose Work was waited for, has completed when the device has passed an event after it.
 * Events use the CUDA driver, whose functions do not set a "last error" that torch could see. They release the GIL, because
 * they block while a thread that loads a kernel holds the context. */
enum { MAX_DEVICES = 64, MAX_MARKS = 1 << 15, NO_TIMING = 2, NOT_READY = 600, ASKED_AT_ONCE = 128 };

static struct {
    void **events;
    int count, room;
} spare[MAX_DEVICES]; /* unused events; kept, because creating them is expensive */

typedef struct {
    void *event;
    uint64_t begin;
    PyObject *parts; /* numbers of the calls that end with it */
    int device;
} Mark;

typedef struct {
    PyObject_HEAD
    Ring *ring;
    PyObject *in_use, *device, *stream; /* torch's functions: is CUDA initialized, current device, current stream */
    int (*create)(void **, unsigned), (*record)(void *, void *), (*query)(void *), (*capturing)(void *, int *);
    Mark *marks;
    int count, room, asking, marking;
    char ready;
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

/* The current device and the address of its current stream; 0, without an exception, if there is none. */
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

/* Records an event on the current stream; the calls `begin` and `parts` have ended when the device has passed it. 0 if a
 * graph is being captured, or there is no usable device. */
static int mark_device(Markers *self, uint64_t begin, PyObject *parts) {
    void *stream, *event = NULL;
    int device, status = 0, failed;
    if (!self || self->ring->capturing || !current_stream(self, &device, &stream))
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
    self->marks[self->count++] = (Mark){event, begin, Py_NewRef(parts), device};
    return 1;
}

static void end_marked(Markers *self, Mark *mark, int state) {
    spare_event(mark->device, mark->event);
    if (self->ring->view.obj)
        finish_with_parts(self->ring, mark->begin, mark->parts, state);
}

/* Queries `count` marks from index `at` on, and records the ends; returns how many are left. A short query stops at the
 * first event that the device has not passed. */
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
    Mark *marks = self->marks + at; /* may have been reallocated; other threads only append */
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
    if (self->asking || self->ring->capturing)
        return; /* another thread is querying, or events may not be queried */
    self->asking = 1;
    for (int at = 0, count; limit > 0 && at < self->count && !self->ring->capturing; limit -= count) {
        count = self->count - at < ASKED_AT_ONCE ? self->count - at : ASKED_AT_ONCE;
        at += ask_marks(self, at, count < limit ? count : limit, whole);
        if (!whole)
            break;
    }
    self->asking = 0;
}

static PyObject *Markers_settle(Markers *self, PyObject *unused) {
    settle_marks(self, MAX_MARKS, 1);
    Py_RETURN_NONE;
}

static PyObject *Markers_busy(Markers *self, void *unused) { return PyBool_FromLong(self->asking || self->marking); }
static Py_ssize_t Markers_length(Markers *self) { return self->count; }

static PyMethodDef Markers_methods[] = {
    {"settle", (PyCFunction)Markers_settle, METH_NOARGS, "Notes every call that the device has passed."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef Markers_getset[] = {
    {"busy", (getter)Markers_busy, NULL, "Whether a thread is in CUDA's driver for us.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot Markers_slots[] = {
    {Py_tp_init, Markers_init},     {Py_tp_dealloc, Markers_dealloc}, {Py_tp_methods, Markers_methods},
    {Py_tp_getset, Markers_getset}, {Py_sq_length, Markers_length},   {Py_tp_doc, "Events behind calls."},
    {0, NULL},
};

static PyType_Spec Markers_spec = {"allranks.recording._fast.Markers", sizeof(Markers), 0, Py_TPFLAGS_DEFAULT, Markers_slots};

/* ---- Methods ------------------------------------------------------------------------------------------------- */

enum { NOWHERE = -1, SWEEP_MARKS = 8, SWEEP_NS = 1000000 /* between two sweeps of the pending calls */ };
enum { MAX_SHAPES = 100000 }; /* distinct sizes cached per method; Python reads further ones on every call */

/* The layout of torch's options objects: the address of the C++ value is at `value_at` in the Python object, the fields are
 * at these offsets in the value (found and tested by torch_internals.py). NOWHERE: no such field. */
typedef struct {
    PyTypeObject *type;
    int value_at, reduce_at, root_at, timeout_at;
} Layout;

/* The positions of a method's arguments; `self` is argument 0, and 0 means none. */
typedef struct {
    int count, out, in, out_splits, in_splits, options, peer, tag;
} Form;

/* The shared state of the methods of one recorder. */
typedef struct {
    PyObject_HEAD
    PyObject *args; /* the constructor's arguments, which own the other fields */
    Ring *ring;
    PyObject *pending, *groups; /* pending calls by work; counters by group */
    Stacks *stacks;             /* NULL: no stacks */
    Markers *markers;           /* NULL: no usable device */
    PyObject *meet, *new_stack, *failed, *wait_failed, *sweep;
    char enabled;
} Recording;

/* A recorded method of torch: `original` is torch's function, `read` reads a call in Python. */
typedef struct {
    PyObject_HEAD
    vectorcallfunc vectorcall;
    PyObject *args, *original, *read, *shapes;
    Recording *shared;
    Layout layout;
    Form form;
    long long op;
} Method;

/* Recording(ring, pending, groups, stacks or None, markers or None, meet, new_stack, failed, wait_failed, sweep) */
static int Recording_init(Recording *self, PyObject *args, PyObject *kwargs) {
    PyObject *stacks, *markers;
    if (self->args || !PyArg_ParseTuple(args, "O!O!O!OOOOOOO", ring_type, &self->ring, &PyDict_Type, &self->pending,
                                        &PyDict_Type, &self->groups, &stacks, &markers, &self->meet, &self->new_stack,
                                        &self->failed, &self->wait_failed, &self->sweep))
        return -1;
    if ((stacks != Py_None && !PyObject_TypeCheck(stacks, stacks_type)) ||
        (markers != Py_None && !PyObject_TypeCheck(markers, markers_type))) {
        PyErr_SetString(PyExc_TypeError, "these are not parts of this module");
        return -1;
    }
    self->stacks = stacks == Py_None ? NULL : (Stacks *)stacks;
    self->markers = markers == Py_None ? NULL : (Markers *)markers;
    self->args = Py_NewRef(args);
    self->enabled = 1;
    return 0;
}

static void Recording_dealloc(Recording *self) {
    Py_XDECREF(self->args);
    PyTypeObject *type = Py_TYPE(self);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyMemberDef Recording_members[] = {
    {"enabled", T_BOOL, offsetof(Recording, enabled), 0, "False: calls go straight to torch."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Recording_slots[] = {
    {Py_tp_init, Recording_init},
    {Py_tp_dealloc, Recording_dealloc},
    {Py_tp_members, Recording_members},
    {Py_tp_doc, "What the methods of one recorder share."},
    {0, NULL},
};

static PyType_Spec Recording_spec = {"allranks.recording._fast.Recording", sizeof(Recording), 0, Py_TPFLAGS_DEFAULT, Recording_slots};

static void Method_dealloc(Method *self) {
    Py_XDECREF(self->args);
    Py_XDECREF(self->shapes);
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

/* Calls a notice and ignores its result. */
static void ask(PyObject *answer) {
    if (!answer)
        PyErr_Clear();
    Py_XDECREF(answer);
}

/* The counters of the group of this call, which Python creates at its first call; NULL: the call is not recorded. */
static Counters *recorded_group(Recording *shared, PyObject *const *args, size_t flags) {
    if (!shared->enabled || !PyVectorcall_NARGS(flags) || !shared->ring->view.obj)
        return NULL;
    PyObject *key = PyLong_FromVoidPtr(args[0]);
    PyObject *found = key ? Py_XNewRef(PyDict_GetItemWithError(shared->groups, key)) : NULL;
    Py_XDECREF(key);
    PyErr_Clear();
    if (!found)
        found = PyObject_CallOneArg(shared->meet, args[0]);
    if (found && PyObject_TypeCheck(found, counters_type))
        return (Counters *)found;
    ask(found);
    return NULL;
}

static long long global_rank(const Counters *group, long long rank) {
    return rank >= 0 && rank < PyTuple_GET_SIZE(group->ranks) ? PyLong_AsLongLong(PyTuple_GET_ITEM(group->ranks, rank))
                                                             : rank;
}

/* Root, operator and timeout of an options object, read in place; 0 if Python must read it. */
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

/* The key of a call's shapes: sizes and dtypes of its tensors, and its splits. */
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

/* A tensor, a list of tensors or a list of such lists; 0 for anything else or too many tensors. Tensors in an inner list have
 * the same dtype, as torch requires. */
static int add_tensors(Key *key, PyObject *given, int depth, int with_type) {
    if (!PyList_CheckExact(given))
        return add_to_key(key, PyObject_GetAttr(given, str_shape)) &&
               (!with_type || add_to_key(key, PyObject_GetAttr(given, str_dtype)));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); i++) {
        PyObject *item = Py_NewRef(PyList_GET_ITEM(given, i)); /* a tensor subclass may change the list */
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

/* Whether a call of a group with several backends uses the one for CPU tensors. */
static int is_on_cpu(PyObject *tensors) {
    PyObject *tensor = Py_NewRef(tensors);
    while (PyList_CheckExact(tensor) && PyList_GET_SIZE(tensor))
        Py_SETREF(tensor, Py_NewRef(PyList_GET_ITEM(tensor, 0)));
    PyObject *answer = PyObject_GetAttr(tensor, str_is_cpu);
    int on_cpu = answer == Py_True;
    Py_DECREF(tensor);
    ask(answer);
    return on_cpu;
}

/* Reads a call in torch.distributed's form: all arguments positional, except possibly `opts`. 0 if Python must read it; `key`
 * is then the key of its tensors, if any. */
static int read_usual(Method *self, Counters *group, PyObject *const *args, size_t flags, PyObject *names, Call *call,
                      int *on_cpu, PyObject **key) {
    const Form *form = &self->form;
    Py_ssize_t named = names ? PyTuple_GET_SIZE(names) : 0;
    if (PyVectorcall_NARGS(flags) + named != form->count ||
        (named && (named != 1 || form->options != form->count - 1 ||
                   PyUnicode_Compare(PyTuple_GET_ITEM(names, 0), str_opts))))
        return 0;
    PyObject *tensors = form->in ? args[form->in] : form->out ? args[form->out] : NULL, *shapes;
    if ((!tensors && group->cpu_side != Py_None) ||
        (form->options && !read_options(&self->layout, args[form->options], group, call)))
        return 0;
    if (form->peer) {
        call->peer = global_rank(group, PyLong_AsLongLong(args[form->peer]));
        call->tag = PyLong_AsLongLong(args[form->tag]) & 0x7FFFFFFF;
    }
    if (PyErr_Occurred())
        return 0;
    if (!tensors)
        return 1;
    *on_cpu = group->cpu_side != Py_None && is_on_cpu(tensors);
    *key = key_of_tensors(form, args);
    shapes = *key ? PyDict_GetItemWithError(self->shapes, *key) : NULL;
    return shapes && PyArg_ParseTuple(shapes, "LLL", &call->shapes, &call->in_numel, &call->out_numel);
}

/* Calls `read(args, kwargs)`, which returns ((shapes, elements in, elements out), reduce_op, root, peer, p2p, timeout_ms, tag, on_cpu),
 * with group-local ranks. 0 on failure. */
static int read_in_python(Method *self, Counters *group, PyObject *const *args, size_t flags, PyObject *names, Call *call,
                          int *p2p, int *on_cpu, PyObject *key) {
    Py_ssize_t count = PyVectorcall_NARGS(flags);
    PyObject *given = PyTuple_New(count - 1), *named = PyDict_New(), *shapes;
    for (Py_ssize_t i = 1; given && i < count; i++)
        PyTuple_SET_ITEM(given, i - 1, Py_NewRef(args[i]));
    for (Py_ssize_t i = 0; named && names && i < PyTuple_GET_SIZE(names); i++)
        if (PyDict_SetItem(named, PyTuple_GET_ITEM(names, i), args[count + i]) < 0)
            Py_CLEAR(named);
    PyObject *answer = given && named ? PyObject_CallFunctionObjArgs(self->read, given, named, NULL) : NULL;
    int fine = answer && PyTuple_Check(answer) &&
               PyArg_ParseTuple(answer, "O!LLLpLLp", &PyTuple_Type, &shapes, &call->reduce_op, &call->root, &call->peer,
                                p2p, &call->timeout_ms, &call->tag, on_cpu) &&
               PyArg_ParseTuple(shapes, "LLL", &call->shapes, &call->in_numel, &call->out_numel);
    if (fine) {
        call->root = global_rank(group, call->root);
        call->peer = global_rank(group, call->peer);
        if (key && PyDict_GET_SIZE(self->shapes) < MAX_SHAPES)
            PyDict_SetItem(self->shapes, key, shapes);
    }
    Py_XDECREF(answer);
    Py_XDECREF(named);
    Py_XDECREF(given);
    return fine;
}

/* The id of the stack of this call; Python assigns the id of a new one. */
static long stack_of_call(Recording *shared) {
    long id = shared->stacks ? find_stack(shared->stacks) : 0;
    if (id >= 0)
        return id;
    PyObject *answer = PyObject_CallNoArgs(shared->new_stack);
    id = answer && PyLong_Check(answer) ? PyLong_AsLong(answer) : 0;
    ask(answer);
    return id < 0 ? 0 : id;
}

/* Occasionally checks whether other calls have ended. */
static void look_around(Recording *shared) {
    Ring *ring = shared->ring;
    int64_t now = ticking_ns();
    int marks = shared->markers ? shared->markers->count : 0, works = PyDict_GET_SIZE(shared->pending) > 0;
    if ((!marks && !works) || now - ring->swept_ns < SWEEP_NS)
        return;
    ring->swept_ns = now;
    if (marks)
        settle_marks(shared->markers, SWEEP_MARKS, 0);
    if (works)
        ask(PyObject_CallNoArgs(shared->sweep));
}

/* The library has returned a Work, or None: the call and its parts have ended, or are queued on the device. */
static void follow(Recording *shared, Counters *side, PyObject *work, uint64_t begin, PyObject *parts) {
    Ring *ring = shared->ring;
    if (!ring->view.obj || (ring->capturing && !side->blocking))
        return; /* the end of a captured call is unknown */
    if (work == Py_None) {
        if (side->blocking || !mark_device(shared->markers, begin, parts))
            finish_with_parts(ring, begin, parts, COMPLETED);
    } else {
        if (side->blocking)
            mark_started(ring, begin, now_ns());
        Entry before = ring->last;
        ring->last = (Entry){Py_NewRef(work), Py_NewRef((PyObject *)side), Py_NewRef(parts), begin};
        if (before.work)
            keep(shared->pending, before); /* may run another thread, which may add a call */
    }
    look_around(shared);
}

/* Calls `notice` with the current exception, and sets it again. `given` (stolen) is passed before or after it. */
static void tell_failure(PyObject *notice, PyObject *first, PyObject *last) {
    PyObject *kind, *error, *trace;
    PyErr_Fetch(&kind, &error, &trace);
    PyErr_NormalizeException(&kind, &error, &trace);
    if (first)
        ask(PyObject_CallFunctionObjArgs(notice, first, error ? error : Py_None, last, NULL));
    Py_XDECREF(first);
    PyErr_Restore(kind, error, trace);
}

static PyObject *Collective_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    Recording *shared = self->shared;
    Counters *group = recorded_group(shared, args, flags);
    if (!group)
        return PyObject_Vectorcall(self->original, args, flags, names);
    Call call = {.op = self->op, .root = -1, .peer = -1, .tag = -1};
    int p2p = self->form.peer != 0, on_cpu = 0;
    PyObject *key = NULL, *work = NULL;
    int known = read_usual(self, group, args, flags, names, &call, &on_cpu, &key);
    PyErr_Clear();
    if (!known)
        known = read_in_python(self, group, args, flags, names, &call, &p2p, &on_cpu, key);
    PyErr_Clear();
    Py_XDECREF(key);
    if (!known)
        work = PyObject_Vectorcall(self->original, args, flags, names);
    else {
        call.stack = stack_of_call(shared);
        uint64_t begin = begin_call(shared->ring, group, p2p, &call);
        work = PyObject_Vectorcall(self->original, args, flags, names);
        if (!work)
            tell_failure(shared->failed, PyLong_FromUnsignedLongLong(begin), no_parts);
        else if (!group->parts) /* else the end of the batch applies to all its parts */
            follow(shared, on_cpu && group->cpu_side != Py_None ? (Counters *)group->cpu_side : group, work, begin, no_parts);
    }
    Py_DECREF(group);
    return work;
}

/* The start of a batch. */
static PyObject *Start_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    Counters *group = recorded_group(self->shared, args, flags);
    if (group && open_batch(group) < 0)
        PyErr_Clear();
    Py_XDECREF(group);
    return PyObject_Vectorcall(self->original, args, flags, names);
}

/* The end of a batch: its row and its Work represent all of its calls. */
static PyObject *End_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    Recording *shared = self->shared;
    Counters *group = recorded_group(shared, args, flags);
    Call call = {.op = self->op, .root = -1, .peer = -1, .tag = -1};
    if (group) {
        call.stack = stack_of_call(shared);
        native_thread(shared->ring);
    }
    PyObject *parts = group ? close_batch(group, &call) : NULL;
    if (!parts) {
        PyErr_Clear();
        Py_XDECREF(group);
        return PyObject_Vectorcall(self->original, args, flags, names);
    }
    call.group = group->number;
    call.timeout_ms = group->timeout_ms;
    uint64_t begin = write_row(shared->ring, &call);
    PyObject *work = PyObject_Vectorcall(self->original, args, flags, names);
    if (work)
        follow(shared, group, work, begin, parts);
    else
        tell_failure(shared->failed, PyLong_FromUnsignedLongLong(begin), parts);
    Py_DECREF(parts);
    Py_DECREF(group);
    return work;
}

/* Removes a call from the pending ones; its work is NULL if it is not pending. */
static Entry take(Recording *shared, PyObject *work) {
    Entry entry = {NULL, NULL, NULL, 0};
    if (work == shared->ring->last.work) {
        entry = shared->ring->last;
        shared->ring->last = (Entry){NULL, NULL, NULL, 0};
        return entry;
    }
    PyObject *key = PyLong_FromVoidPtr(work);
    PyObject *kept = key ? PyDict_GetItemWithError(shared->pending, key) : NULL;
    unsigned long long begin;
    if (kept && PyTuple_Check(kept) && PyArg_ParseTuple(kept, "OKO!O!", &entry.work, &begin, counters_type, &entry.group,
                                                        &PyTuple_Type, &entry.parts)) {
        entry = (Entry){Py_NewRef(entry.work), Py_NewRef(entry.group), Py_NewRef(entry.parts), begin};
        PyDict_DelItem(shared->pending, key);
    } else
        entry.work = NULL;
    Py_XDECREF(key);
    PyErr_Clear();
    return entry;
}

/* The program's wait() has returned: the call has ended, or is still queued on the device. In that case a marker replaces the
 * Work, which would keep its tensors in device memory. */
static void after_wait(Recording *shared, PyObject *work) {
    Ring *ring = shared->ring;
    Entry entry = take(shared, work);
    if (!entry.work)
        return;
    int ended = ((Counters *)entry.group)->blocking;
    if (!ended && !ring->capturing) {
        if (mark_device(shared->markers, entry.begin, entry.parts)) {
            drop_entry(entry);
            return;
        }
        PyObject *answer = PyObject_CallMethodNoArgs(work, str_is_completed);
        ended = answer == Py_True;
        ask(answer);
    }
    if (!ended) {
        keep(shared->pending, entry);
        return;
    }
    finish_with_parts(ring, entry.begin, entry.parts, COMPLETED);
    drop_entry(entry);
}

static PyObject *Wait_call(PyObject *callable, PyObject *const *args, size_t flags, PyObject *names) {
    Method *self = (Method *)callable;
    Recording *shared = self->shared;
    Ring *ring = shared->ring;
    if (!shared->enabled || PyVectorcall_NARGS(flags) < 1 || !ring->view.obj ||
        (args[0] != ring->last.work && !PyDict_GET_SIZE(shared->pending)))
        return PyObject_Vectorcall(self->original, args, flags, names);
    PyObject *work = Py_NewRef(args[0]);
    PyObject *result = PyObject_Vectorcall(self->original, args, flags, names);
    if (!result) {
        hand_over(ring, shared->pending);
        tell_failure(shared->wait_failed, Py_NewRef(work), PyVectorcall_NARGS(flags) > 1 || names ? Py_True : Py_False);
    } else if (ring->view.obj && shared->enabled)
        after_wait(shared, work);
    Py_DECREF(work);
    return result;
}

enum { COLLECTIVE, BATCH_BEGIN, BATCH_CLOSE, WAIT };
static const vectorcallfunc kinds[] = {Collective_call, Start_call, End_call, Wait_call};

/* Method(recording, original, kind, op, read, form, layout), form as in Form, layout = (options_type, value_at, reduce_at,
 * root_at, timeout_at); the last three of a COLLECTIVE only. */
static int Method_init(Method *self, PyObject *args, PyObject *kwargs) {
    int kind;
    Form *form = &self->form;
    Layout *layout = &self->layout;
    if (self->args || !PyArg_ParseTuple(args, "O!OiL|O(iiiiiiii)(O!iiii)", recording_type, &self->shared, &self->original,
                                        &kind, &self->op, &self->read, &form->count, &form->out, &form->in,
                                        &form->out_splits, &form->in_splits, &form->options, &form->peer, &form->tag,
                                        &PyType_Type, &layout->type, &layout->value_at, &layout->reduce_at,
                                        &layout->root_at, &layout->timeout_at))
        return -1;
    if (kind < COLLECTIVE || kind > WAIT || (kind == COLLECTIVE && PyTuple_GET_SIZE(args) != 7)) {
        PyErr_SetString(PyExc_ValueError, "no such kind of method");
        return -1;
    }
    self->shapes = PyDict_New();
    if (!self->shapes)
        return -1;
    self->vectorcall = kinds[kind];
    self->args = Py_NewRef(args);
    return 0;
}

/* Other attributes, such as __name__, are those of the original method. */
static PyObject *Method_getattr(PyObject *self, PyObject *name) {
    PyObject *found = PyObject_GenericGetAttr(self, name);
    if (found || !((Method *)self)->original || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
    PyErr_Clear();
    return PyObject_GetAttr(((Method *)self)->original, name);
}

static PyMemberDef Method_members[] = {
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Method, vectorcall), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot Method_slots[] = {
    {Py_tp_init, Method_init},         {Py_tp_dealloc, Method_dealloc}, {Py_tp_descr_get, Method_get},
    {Py_tp_getattro, Method_getattr},
    {Py_tp_call, PyVectorcall_Call},   {Py_tp_members, Method_members}, {Py_tp_doc, "A method of ProcessGroup or Work, recorded."},
    {0, NULL},
};

enum { METHOD_FLAGS = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR };
static PyType_Spec Method_spec = {"allranks.recording._fast.Method", sizeof(Method), 0, METHOD_FLAGS, Method_slots};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_fast", "The hot path of the recorder.", -1, NULL};

static PyTypeObject *add_type(PyObject *made, const char *name, PyType_Spec *spec) {
    PyObject *type = made ? PyType_FromSpec(spec) : NULL;
    if (!type || PyModule_AddObject(made, name, Py_NewRef(type)) < 0)
        return NULL;
    return (PyTypeObject *)type; /* never freed: the checks above compare with it */
}

#ifndef BUILT_FOR
#define BUILT_FOR PY_VERSION
#endif

/* Frames are read in place, which requires the Python that this was built for: the same 3.x, or exactly the same version if
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
    ring_type = add_type(made, "Ring", &Ring_spec);
    stacks_type = add_type(made, "Stacks", &Stacks_spec);
    counters_type = add_type(made, "Counters", &Counters_spec);
    markers_type = add_type(made, "Markers", &Markers_spec);
    recording_type = add_type(made, "Recording", &Recording_spec);
    str_shape = PyUnicode_InternFromString("shape");
    str_dtype = PyUnicode_InternFromString("dtype");
    str_is_cpu = PyUnicode_InternFromString("is_cpu");
    str_is_completed = PyUnicode_InternFromString("is_completed");
    str_opts = PyUnicode_InternFromString("opts");
    no_parts = PyTuple_New(0);
    if (!ring_type || !stacks_type || !counters_type || !markers_type || !recording_type || !str_shape || !str_dtype ||
        !str_is_cpu || !str_is_completed || !str_opts || !no_parts || !add_type(made, "Method", &Method_spec) ||
        PyModule_AddIntConstant(made, "VERSION", 7) < 0 || PyModule_AddIntMacro(made, COLLECTIVE) < 0 ||
        PyModule_AddIntMacro(made, BATCH_BEGIN) < 0 || PyModule_AddIntMacro(made, BATCH_CLOSE) < 0 ||
        PyModule_AddIntMacro(made, WAIT) < 0)
        return NULL;
    return made;
}
