"""What the source around a line says: which locks are held there, which lock the line asks for, whether it only polls. Pure.

The interpreter does not record who holds a lock. A thread that stands inside `with self.lock:` holds it.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterable, Iterator
from functools import lru_cache

_CLOCKS = frozenset({"monotonic", "time", "perf_counter"})
_LOCKS = ("lock", "mutex", "sem", "cond", "guard")


#: Python 3.11 raises SystemError in one of two threads that parse at the same time.
_one_parses = threading.Lock()


@lru_cache(maxsize=64)
def _tree(text: str) -> ast.Module | None:
    try:
        with _one_parses:
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


@lru_cache(maxsize=1000)
def _around(text: str, line: int) -> list[ast.stmt]:
    """The statements that a line is in, outermost first."""
    tree = _tree(text)
    found: list[ast.stmt] = []
    body: list[ast.stmt] = list(tree.body) if tree is not None else []
    while body:
        inside = next((s for s in body if _covers(s, line)), None)
        if inside is None:
            break
        found.append(inside)
        children = (node for node in ast.walk(inside) if isinstance(node, ast.stmt) and node is not inside)
        body = [child for child in children if _covers(child, line)]
        body.sort(key=lambda s: (s.lineno, -(s.end_lineno or s.lineno)))
    return found


def _last_function(statements: list[ast.stmt]) -> list[ast.stmt]:
    """Of the statements around a line those of the innermost function."""
    starts = [i for i, s in enumerate(statements) if isinstance(s, ast.FunctionDef | ast.AsyncFunctionDef)]
    return statements[starts[-1] :] if starts else statements


def held_locks(text: str, line: int, deep: bool = True) -> tuple[str, ...]:
    """Expressions of the locks that a frame at this line holds: blocks of `with` that it is inside of, what a context manager
    of the same file holds there (if `deep`), and `x.acquire()` without `x.release()` before it in the same function."""
    around = _last_function(_around(text, line))
    held: dict[str, None] = {}
    for one in around:
        if isinstance(one, ast.With | ast.AsyncWith) and one.body and one.body[0].lineno <= line:
            held |= dict.fromkeys(ast.unparse(item.context_expr) for item in one.items)
            made = [i.context_expr.func for i in one.items if isinstance(i.context_expr, ast.Call) and deep]
            inside = (at for call in made for at in _yields(text, _last_word(call)))
            held |= dict.fromkeys(lock for at in inside for lock in held_locks(text, at, deep=False))
    if around:
        calls = [
            (node.lineno, ast.unparse(node.func.value), node.func.attr)
            for node in _own_nodes(around[0])
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.lineno < line
        ]
        for _, name, method in sorted(calls):
            if method == "acquire":
                held[name] = None
            elif method == "release":
                held.pop(name, None)
    return tuple(held)


def _yields(text: str, name: str) -> list[int]:
    """The lines at which a function that makes a context manager gives control to the block of `with`."""
    tree = _tree(text)
    made = [f for f in _functions(tree) if f.name == name and f.decorator_list] if tree is not None else []
    return [node.lineno for function in made for node in _own_nodes(function) if isinstance(node, ast.Yield)]


def _own_nodes(function: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a function without those of functions inside it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            yield node
            yield from _own_nodes(node)


def asked_lock(text: str, line: int) -> str:
    """The lock that a line asks for: of `with LOCK:` or `LOCK.acquire()`; "" when it does neither."""
    for one in reversed(_around(text, line)):
        if isinstance(one, ast.With | ast.AsyncWith) and one.body and line < one.body[0].lineno:
            at = [i for i in one.items if _covers(i.context_expr, line)]
            names = [ast.unparse(item.context_expr) for item in at or one.items]
            return next((n for n in names if names_lock(n, "")), names[0])
        for value, method in _method_calls(one, line):
            if method == "acquire":
                return ast.unparse(value)
    return ""


def names_lock(text: str, method: str) -> bool:
    """Whether an expression that a line enters or acquires is a lock by its name or its method."""
    return bool(text) and (method == "acquire" or any(word in text.lower() for word in _LOCKS))


def _covers(node: ast.expr | ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or node.lineno)


def _called(nodes: Iterable[ast.AST]) -> set[str]:
    """The names of the functions that are called."""
    return {_last_word(node.func) for node in nodes if isinstance(node, ast.Call)}


def _method_calls(tree: ast.AST, line: int = 0) -> Iterator[tuple[ast.expr, str]]:
    """(object, method) of the calls of methods, all or those of one line."""
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and (not line or _covers(node, line))
        ):
            yield node.func.value, node.func.attr


def _loops(text: str, line: int) -> list[ast.While | ast.For | ast.AsyncFor]:
    """The loops of the innermost function that a line is in, outermost first."""
    around = _last_function(_around(text, line))
    return [one for one in around if isinstance(one, ast.While | ast.For | ast.AsyncFor)]


def _loop(text: str, line: int) -> ast.While | None:
    """The `while` loop that is the innermost loop around a line."""
    last = next(reversed(_loops(text, line)), None)
    return last if isinstance(last, ast.While) else None


def in_loop(text: str, line: int) -> bool:
    """Whether a line is in a `while` loop."""
    return _loop(text, line) is not None


def is_poll(text: str, line: int) -> bool:
    """Whether a line sleeps in a `while` loop that tests a condition or does little else: it waits for a change. One that works
    and then sleeps, for ever or until somebody stops it, does not."""
    loop = _loop(text, line)
    if loop is None:
        return False
    nodes = [*_own_nodes(loop)]
    tests = [n for test in _exits(loop, nodes) for n in ast.walk(test)]
    asked = _called(tests)
    own = all(isinstance(n, ast.Constant) for n in tests) or (bool(asked) and asked <= _OWN_CALLS)
    tried = [part for n in nodes if isinstance(n, ast.Try) for part in (*n.body, *n.orelse)]
    own = own and not any(isinstance(n, ast.Break | ast.Return) for part in tried for n in ast.walk(part))
    return not own or _called(nodes) <= _OWN_CALLS | {"sleep", "print", "info", "debug"}


def polled(text: str, line: int) -> str:
    """What a loop that polls at a line tests; "" where none does."""
    loop = _loop(text, line) if is_poll(text, line) else None
    tests = _exits(loop, [*_own_nodes(loop)]) if loop is not None else ()
    return next((ast.unparse(test) for test in tests if not isinstance(test, ast.Constant)), "")


def only_sleeps(text: str, line: int) -> bool:
    """Whether a line is in a loop without end that does nothing else: it keeps its process alive."""
    loop = _loop(text, line)
    nodes = [] if loop is None or not isinstance(loop.test, ast.Constant) else [*_own_nodes(loop)]
    leaves = any(isinstance(n, ast.Break | ast.Return) for n in nodes)
    return not leaves and _called(nodes) == {"sleep"}


def tries_again(text: str, line: int) -> bool:
    """Whether a line is in a `while` loop that does not look at the clock: a wait there that is over begins anew."""
    loop = _loop(text, line)
    return loop is not None and not _called(ast.walk(loop.test)) & _CLOCKS


def takes_work(text: str, line: int) -> bool:
    """Whether a line begins a round of a loop without end: what it waits for there is its next work."""
    loops = _loops(text, line)
    last = loops[-1] if loops else None
    if isinstance(last, ast.For) and isinstance(last.iter, ast.Call) and _covers(last.iter, line):
        return _last_word(last.iter.func) == "iter" and len(last.iter.args) == 2
    if isinstance(last, ast.AsyncFor):
        return _covers(last.iter, line) and line < last.body[0].lineno
    loop = last if isinstance(last, ast.While) else None
    if loop is not None and _covers(loop.test, line) and isinstance(loop.test, ast.NamedExpr):
        return True
    if loop is None or any(isinstance(n, ast.Compare) for n in ast.walk(loop.test)):
        return False
    first: ast.stmt = loop.body[0]
    while isinstance(first, ast.With | ast.Try) and first.body[0].lineno <= line:
        first = first.body[0]
    return _covers(first, line)


#: Calls whose result says nothing of another process.
_OWN_TEXT = (
    "is_set is_alive exists Path join is_file isfile glob listdir time monotonic perf_counter len range "
    "isinstance int min max"
)
_OWN_CALLS = frozenset(_OWN_TEXT.split())


def retry_loop(text: str, line: int) -> int:
    """The first line of a loop around this one that sleeps, and ends only when a call in it answers otherwise; 0: there is none.
    A loop that runs until somebody stops the program is not one."""
    for loop in reversed(_loops(text, line)):
        nodes = [*_own_nodes(loop)]
        if "sleep" in _called(nodes) and any(_tests_answer(test, nodes) for test in _exits(loop, nodes)):
            return loop.lineno
    return 0


def _exits(loop: ast.While | ast.For | ast.AsyncFor, nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """The conditions that end a loop."""
    if isinstance(loop, ast.While):
        yield loop.test
    for node in nodes:
        parts = (*node.body, *node.orelse) if isinstance(node, ast.If) else ()
        if any(isinstance(one, ast.Break | ast.Return) for part in parts for one in ast.walk(part)):
            assert isinstance(node, ast.If)
            yield node.test


def _tests_answer(test: ast.expr, nodes: list[ast.AST]) -> bool:
    """Whether a condition asks another process, or tests what a call in the loop has answered."""
    given = {
        name.id
        for node in nodes
        if isinstance(node, ast.Assign) and _called(ast.walk(node.value)) - _OWN_CALLS
        for target in node.targets
        for name in ast.walk(target)
        if isinstance(name, ast.Name)
    }
    tested = [*ast.walk(test)]
    answers = any(isinstance(n, ast.Name) and n.id in given for n in tested)
    return answers or bool(_called(tested) - _OWN_CALLS)


#: Calls of a loop that only waits, beside those of _OWN_CALLS: pauses, and reads of memory.
_READS = frozenset(
    [
        "sleep",
        "sched_yield",
        "item",
        "bytes",
        "bool",
        "float",
        "any",
        "all",
        "from_bytes",
        "unpack",
        "unpack_from",
    ]
)


def idle_loop(text: str, line: int) -> int:
    """The first line of the innermost loop around this one, if the loop changes nothing and does not look at the clock: only
    something outside of it can end it. 0: any other loop, or none."""
    loop = _loop(text, line)
    nodes = [*_own_nodes(loop)] if loop is not None else []
    if loop is None or _called(nodes) & _CLOCKS or _called(nodes) - _OWN_CALLS - _READS:
        return 0
    stores = [n for n in nodes if isinstance(getattr(n, "ctx", None), ast.Store | ast.Del)]
    if any(isinstance(n, _EFFECTS) for n in nodes) or not all(isinstance(n, ast.Name) for n in stores):
        return 0
    given = (n.value for n in nodes if isinstance(n, ast.Assign | ast.AnnAssign | ast.NamedExpr) and n.value)
    return 0 if _names(given) & _names(stores) else loop.lineno


_EFFECTS = (ast.Await, ast.Yield, ast.YieldFrom, ast.AugAssign, ast.Global, ast.Nonlocal)


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def polls_memory(text: str, line: int) -> bool:
    """Whether such a loop only compares values: what it waits for can only come through memory."""
    loop = _loop(text, line)
    return loop is not None and _called(ast.walk(loop)) <= {
        "sleep",
        "len",
        "int",
        "bytes",
        "sched_yield",
        "item",
    }


#: What a call waits for -> the calls that end the wait.
_ENDED_BY = {
    "wait": ("set", "notify", "notify_all", "abort"),
    "wait_for": ("notify", "notify_all"),
    "get": ("put", "put_nowait", "send"),
    "put": ("get", "get_nowait", "task_done"),
    "join": ("task_done",),
    "recv": ("send",),
    "acquire": ("release",),
    "result": ("set_result", "set_exception"),
    "await": ("set_result", "set_exception", "set"),
}


def waited_object(text: str, line: int) -> tuple[str, str]:
    """(name, method) of what a line waits on: `self.done.wait()` is ("done", "wait"); ("", "") when no such call is there."""
    for one in reversed(_around(text, line)):
        calls = [(_last_word(value), method) for value, method in _method_calls(one, line)]
        calls += [
            (_last_word(node.value), "await")
            for node in ast.walk(one)
            if isinstance(node, ast.Await) and _covers(node, line)
        ]
        for name, method in calls:
            if name and name != "asyncio" and method in _ENDED_BY:
                return name, method
        if one.lineno == line:
            break
    return "", ""


def find_setters(text: str, name: str, method: str) -> tuple[str, ...]:
    """The functions of a file that end a wait for an object of this name; not those that only define such a function."""
    tree, ends = _tree(text), _ENDED_BY.get(method, ())
    if tree is None or not name:
        return ()
    calls = [v.lineno for v, called in _method_calls(tree) if called in ends and _last_word(v) == name]
    around = ([f for f in _functions(tree) if _covers(f, line)] for line in calls)
    inner = (max(found, key=lambda one: one.lineno).name for found in around if found)
    return tuple(dict.fromkeys(inner))


def _functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def is_started(text: str, function: str) -> bool:
    """Whether a file runs a function beside others: as the target of a thread or process, or as a task."""
    tree = _tree(text)
    for node in ast.walk(tree) if tree is not None else ():
        if not isinstance(node, ast.Call):
            continue
        given = [k.value for k in node.keywords if k.arg == "target"]
        if _last_word(node.func) in (
            "create_task",
            "ensure_future",
            "submit",
            "run_coroutine_threadsafe",
            "start_soon",
        ):
            given += [a.func if isinstance(a, ast.Call) else a for a in node.args]
        if any(_last_word(one) == function for one in given):
            return True
    return False


def mentions_later(text: str, line: int, word: str) -> bool:
    """Whether the function around a line has a word in or behind that line."""
    around = _last_function(_around(text, line))
    last = around[0].end_lineno or line if around else line
    return bool(word) and any(word in one for one in text.splitlines()[line - 1 : last])


def calls_later(text: str, line: int, name: str) -> bool:
    """Whether the function around a line calls another one behind that line, directly or by a function of the same file."""
    tree, around = _tree(text), _last_function(_around(text, line))
    if tree is None or not around or name not in text:
        return False
    names = {name, *(f.name for f in _functions(tree) if name in _called(_own_nodes(f)))}
    return bool(names & _called(n for n in _own_nodes(around[0]) if getattr(n, "lineno", 0) > line))


def calls_before(text: str, line: int, method: str) -> bool:
    """Whether the function around a line, or the module outside of functions, names a method of an object before that line."""
    tree, around = _tree(text), _last_function(_around(text, line))
    if tree is None or method not in text:
        return False
    inside = bool(around) and isinstance(around[0], ast.FunctionDef | ast.AsyncFunctionDef)
    nodes = _own_nodes(around[0] if inside else tree)
    return any(isinstance(n, ast.Attribute) and n.attr == method and n.lineno < line for n in nodes)


def _last_word(node: ast.expr) -> str:
    """`self.done` is done, `request["done"]` too."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Call):  # made on the spot: nobody else has it
        name = _last_word(node.func)
        return f"{name}()" if name[:1].isupper() else ""
    if isinstance(node, ast.Subscript):
        key = node.slice
        return (
            str(key.value)
            if isinstance(key, ast.Constant) and isinstance(key.value, str)
            else _last_word(node.value)
        )
    return ""
