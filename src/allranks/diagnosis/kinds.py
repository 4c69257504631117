"""Every sentence that `diagnose` says: one table of causes, one table of kinds. Edit the words here; no other file has any.

A cause is the name in the JSON (docs/reference/json.md): what it means, what it takes to be sure, and what would prove it wrong.
A kind is one way to find a cause, with its sentence, evidence, the evidence to ask for, and advice.

{name} is replaced by a fact. [text {name}] is left out when the fact is empty; [one {name}|two] takes the first part whose
facts are all known; [name?text] says the text where the fact is true. Each line of evidence, of what to ask for and of advice
is an item of its own; empty lines are dropped.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CauseInfo:
    """What a cause means, the evidence that makes it sure, and what would prove it wrong."""

    title: str
    needs: str
    wrong_if: str


# fmt: off
#: cause: (what it means, the evidence that makes it sure, what would prove it wrong)
CAUSES = {
    "missing_rank": CauseInfo(
        "a rank did not enter a call that others wait in", "the calls of the missing rank up to the moment of the wait",
        "the rank entered the call later, or its record ends before the wait began"),
    "stuck_before_collective": CauseInfo(
        "a rank is stuck somewhere else and does not come to the call", "the stack of the rank while the others wait",
        "a later stack shows the rank at another line"),
    "rank_died": CauseInfo(
        "a process ended and the others wait for it", "the exit code, the signal or the end of its log",
        "the process is still running"),
    "type_mismatch": CauseInfo(
        "ranks made different operations in one collective", "the calls of all members of the group",
        "an earlier call was skipped or added, so that the numbers of the calls have shifted"),
    "size_mismatch": CauseInfo(
        "ranks passed different sizes to one collective", "the sizes of all members of the group",
        "the operation allows different sizes"),
    "dtype_mismatch": CauseInfo(
        "ranks passed different dtypes to one collective", "the dtypes of all members of the group",
        "the record of a rank has the wrong dtype"),
    "root_mismatch": CauseInfo("ranks named different roots", "the roots of all members of the group", "all ranks named the same root"),
    "reduce_op_mismatch": CauseInfo(
        "ranks asked for different reductions", "the reduce operations of all members of the group",
        "all ranks asked for the same reduction"),
    "extra_collective": CauseInfo(
        "a rank made a call that the others do not make", "the calls of all members of the group, with their lines",
        "the other ranks make the call too, later"),
    "order_inversion": CauseInfo(
        "ranks make the same calls in different order and wait for each other", "the calls of all ranks in the circle",
        "one of the ranks leaves its call"),
    "p2p_mismatch": CauseInfo(
        "a send and a receive do not fit together, or one of them was never posted", "the messages of both ranks",
        "the partner posts the message later"),
    "none_finished": CauseInfo(
        "all ranks entered the call and none finished it: network or device",
        "the calls of all ranks; logs of the network and of the devices",
        "the call finishes, or one rank passed something else"),
    "call_error": CauseInfo("a call failed on some ranks only", "the error of the call", "the call failed on another rank before"),
    "not_started": CauseInfo(
        "a rank never came to its first collective, or to init_process_group", "the record or the stack of the rank",
        "the rank made calls that were not recorded"),
    "setup_mismatch": CauseInfo(
        "ranks called init_process_group with another address or world size", "the arguments of all ranks",
        "both names mean the same host"),
    "no_step": CauseInfo("ranks finish calls, but no training step", "step marks", "the step is longer than all steps before"),
    "no_progress": CauseInfo("no rank is in a call, and none makes one", "the stacks of all ranks", "a rank makes its next call"),
    "straggler": CauseInfo("one rank is slow", "the times of the last calls", "another rank is as late"),
    "damaged_file": CauseInfo("a file could not be read to its end", "a whole file", "the file is whole"),
    "unsafe_pickle": CauseInfo("a file would run code when unpickled", "", "the file comes from torch"),
    "missing_dump": CauseInfo("there is no file of a rank", "the file", "the file is there"),
    "unrecorded": CauseInfo("the recorder does not keep some calls of the job", "stacks of all ranks", "no rank waits in such a call"),
    "skew": CauseInfo("ranks are a few calls apart", "a second dump", "a second dump shows the same calls"),
    "pause": CauseInfo("ranks pause, or paused", "the mark of the pause, or later progress", "the ranks never move again"),
    "folded": CauseInfo("more of the same", "", ""),
}
# fmt: on


@dataclass(frozen=True)
class Kind:
    """One way to find a cause. `sure`: the confidence where the rule does not say otherwise."""

    cause: str
    sure: float
    sentence: str
    evidence: str = ""
    ask: str = ""
    advice: str = ""


_ENTERED = "{entered_by} entered {call}{lines}[ and {later} later had not left it]\n{failure}\n{lasts}"
_ENTERED_ONCE = _ENTERED.replace("{lasts}", "[closed?{lasts}|inside?{lasts}|last?|{lasts}]")
_INSIDE = "{entered_by} entered {call}{lines}\n{failure}"
_BETWEEN = "check what {ranks} {does} between {its} last call and [{at}|{call}]"
_PASSES = "look for a condition, an exception or an early end of a loop that makes {ranks} skip [the {message} for ][{at}|this call]"
_SAME_GROUPS = "make the same groups, with the same members, in the same order on every rank"
_ALL_CALL = (
    "[members?call new_group on {members}: with use_local_synchronization the members make the group"
    "|new?call new_group on every rank, in the same order: it is a call of all ranks, also of those outside the new group"
    "|call {function} on every rank]"
)
_SECOND = "a second dump of all ranks: where nothing has moved, the job hangs"
_NO_FILE = "the black box, dump or log of {ranks}: run `allranks diagnose` with it"
_LAST_LINES = "look for the last log lines of {ranks} (killed, out of memory, node down)"
_OTHER_ARGUMENTS = (
    "[certain?check [{at}|the line above]: what it passes must not depend on the rank"
    "|compare {lines_of_all}: all ranks of the group must make the same call here"
    "|check [{at}|the line above]: what it passes must not depend on the rank]"
)
_SINCE = (
    "[; at #{met} it called {met_mine} where they called {met_theirs}|; at #{met} their calls no longer fit"
    "|; {failed_since}|; now {wait_since}]"
)
_MEMBERS = "[unknown?which ranks are members of the group: its recorder does not say, so a rank without a dump may be lacking]"
_STACKS = "where {ranks} is now: run `allranks stacks` on its node"
_HELD = "[ (rank {held_by} holds the lock)]"
_FIND_OUT = "at {now_at} (rank {now_rank}): {find}|check {now_at}: rank {now_rank} is there now"
_THERE = "; rank {now_rank} {doing} at {now_at}" + _HELD

# fmt: off
KINDS = {
    # ---- a rank that others wait for, with a file
    "never_entered": Kind("missing_rank", 0.9,
        "{who} never {entered}[ ({at})]; {waiting}"
        "[; it has left the program ({closed})|; it is inside {inside}|; it is in {now_in}|; its last call was {last}]",
        _ENTERED_ONCE, "{where_now}\n{unrecorded}", f"[in_new_group?{_SAME_GROUPS}|passed?{_PASSES}|{_BETWEEN}]"),
    "not_started": Kind("not_started", 0.85,
        "{who} never came to {its} first collective; {waiting} in {call}",
        _ENTERED, "{where_now}", _BETWEEN),
    "in_init": Kind("not_started", 0.6,
        "{who} never came to {its} first collective; {waiting} in {call}; {it_is} inside init_process_group",
        _ENTERED, "{where_now}",
        "compare RANK, WORLD_SIZE, MASTER_ADDR and the arguments of init_process_group on all ranks, and check the network between them"),
    "stuck_elsewhere": Kind("stuck_before_collective", 0.95,
        "{who} never {entered}; {waiting}[; {there} {doing} at {now_at}|busy?; {there} {doing}]" + _HELD,
        _ENTERED + "\n{now_evidence}",
        "[polls?which rank should make that change: perhaps a rank that waits here and skipped it]",
        "[exiting?find why the program of {ranks} ended early: it returned, or called sys.exit(0)"
        "|let rank {holder} release the lock before it enters {call}"
        f"|{_FIND_OUT}|{_BETWEEN}]"),
    "destroyed": Kind("missing_rank", 0.93,
        "{who} called destroy_process_group on group {label} and never entered {call}; {waiting}[left?; it has left the program]",
        _ENTERED, "", "make [{at}|this call] before any rank destroys the group, or on no rank"),
    "died": Kind("rank_died", 0.93,
        "{who} [now_at?never|died before it] {entered}: {how}[; its process has not ended, it {doing} at {now_at}" + _HELD + "]; {waiting}",
        _ENTERED + "\n{now_evidence}", "",
        "[check {line}, where rank {rank} ended|read the end of the log of {ranks}, and `dmesg -T {pipe} grep -i kill` on its node]\n"
        "[end what runs at {now_at} when the program fails: it keeps the process of rank {rank} alive]"),
    "went_on_without": Kind("missing_rank", 0.9,
        "{who} never entered {call}[ ({at})] but continued without it[, to {last}]; {waiting}",
        _ENTERED + "\nin all earlier rounds {ranks} made this call at this point", "",
        "look for a condition that makes {ranks} skip [{at}|this call]"),
    "lone_waiter": Kind("extra_collective", 0.6,
        "{who} made an extra {call}[ at {at}]: none of the other {number} ranks entered it, and all of them stopped after the same call",
        _ENTERED, "where {others} are now: `allranks stacks` shows whether they are stuck instead",
        "check what {others} do between their last call and [{at}|{call}]"),
    # ---- a rank that others wait for, without a file
    "no_file": Kind("rank_died", 0.6,
        "there is no file of {ranks}[: {how}]; {waiting} in {call}, [which {missing} did not enter either|in which no other rank is missing]",
        _ENTERED, _NO_FILE, _LAST_LINES),
    "unread": Kind("missing_rank", 0.35,
        "{problem}: whether {ranks} entered {call} is not known; {waiting} in it",
        _ENTERED, "{problems}", "read the files as their owner or as root, or copy those of {ranks} again"),
    "did_not_dump": Kind("missing_rank", 0.6,
        "{ranks} did not enter {call}[ ({at})], or ended before it: there is no dump of {it}; {waiting}",
        _ENTERED + "\nwith this backend only the ranks that wait write a dump when a call times out",
        "where {ranks} is: the end of its log, or `allranks stacks` on its node", _BETWEEN),
    "left_no_dump": Kind("rank_died", 0.35,
        "{ranks} left no dump, and the calls of all other ranks [put_away?were put away ({call} last), whether finished or failed "
        "is not recorded|have finished]: [{how}|it may have died]",
        _ENTERED, _NO_FILE, _LAST_LINES),
    "left_its_round": Kind("missing_rank", 0.6,
        "{who} is in {call}[ at {line}], {difference}; there is no file of {absent}",
        "{entered_by} entered {call}{lines}[ and {later} later had not left it]",
        "the file of {absent}\n{where_now}",
        "[skipped?look for a condition, an exception or an early end of a loop that makes rank {rank} skip [{usual}|that call]"
        "|check [{line}|that call]: it must not depend on the rank]"),
    "aborted_its_partner": Kind("size_mismatch", 0.6,
        "{ranks} [extra?made an extra|called] {op} #{seq} of group {label}[ at {line}], unlike all its other calls; {other} is gone, "
        "as gloo aborts a rank that gets more than it expects",
        "#{seq} is the only call of its kind, and the other rank is gone since\n[of {other}, {log}]",
        "[log?|the log of {other}: 'gloo::EnforceNotMet' confirms it, 'Killed' refutes it]",
        "make the call at [{line}|that line] on all ranks of the group, and with the same sizes"),
    # ---- a call that everybody entered
    "alone": Kind("none_finished", 0.35,
        "[{failed_call}|{who} waits in {call}[{lines}][ for {wait}]]; only the dumps of the other ranks show whether one of them "
        "never entered it",
        _INSIDE, "the dumps of the other ranks: run `allranks diagnose` with all of them"),
    "failed_on_some": Kind("call_error", 0.85, "{call} failed on {who}, while {others_wait} in it", _INSIDE),
    "failed_on_all": Kind("call_error", 0.6, "{call} failed[ on all {number} ranks, first] on {who}", _INSIDE),
    "survived": Kind("call_error", 0.85,
        "{failed} raised {error} on {who}[ at {line}], and its program continued, to {last}; "
        "[here?the others waited in it|since then its calls do not match those of the others]",
        "no call had failed on another rank before, and rank {rank} made calls after it", "",
        "check [{line}|this call]: let the exception end the program instead of passing over it"),
    "died_inside": Kind("rank_died", 0.9, "{who} died with {call} unfinished: {how}", _INSIDE),
    "left_inside": Kind("missing_rank", 0.8, "{who} left the program with {call} unfinished; {others_wait}", _INSIDE),
    "unsure": Kind("missing_rank", 0.35,
        "{waits} in {call}; {who} [many?are not seen there, but their dumps are|is not seen there, but its dump is] damaged, too old, "
        "or without the calls of this group", _INSIDE),
    "some_left": Kind("none_finished", 0.55,
        "{call} finished on {passed} but not on {who}[, {later} later]: network or device of {ranks}, or C code there that keeps "
        "the interpreter lock, so that the end is not recorded", _INSIDE, _STACKS),
    "maybe_older": Kind("none_finished", 0.35,
        "{call} finished on {passed} but not on {who}: it hangs there, or that dump is a moment older", _INSIDE, _SECOND),
    "other_root": Kind("root_mismatch", 0.5,
        "{call} finished on {passed} and hangs on {entered_by}: {who} probably named another root", _INSIDE),
    "none_finished": Kind("none_finished", 0.7,
        "[message?both ends of {call} by {waiters} are posted, and it has not finished[ for {wait}]"
        "|{those} entered {call} and none finished it[ for {wait}]: network or device"
        "[lost?, or an earlier difference that their short rings have lost]][; it never started on the device of {few}]",
        _INSIDE + "\n[agreed?operation, sizes and types are the same on all ranks: the programs agree]",
        "[hidden?the calls inside the batch: their sizes were not recorded, or the ring has lost them]\n"
        "[lost?the calls before: the rings of these ranks were too short to keep them]\n"
        "which link or device: `allranks doctor`, `dmesg -T | grep -iE 'xid|mlx5|link'`, and NCCL_DEBUG=INFO logs\n"
        "[started?|which rank's kernel started: run with TORCH_NCCL_ENABLE_TIMING=1]\n"
        + _MEMBERS),
    # ---- ranks that wait for each other
    "one_too_many": Kind("p2p_mismatch", 0.8,
        "{who} [sends?sends to|receives from] rank {peer} once more than in every round before[ ({line})]; rank {peer} posted as many "
        "messages for it as always and continued",
        _ENTERED, "", "check the loop around [{line}|this call]: both ends must make the same number of calls"),
    "short_round": Kind("p2p_mismatch", 0.75,
        "{who} [sends?sent {number} to|received {number} from] rank {peer} in an earlier round[ ({line})], and {usual} in every other "
        "round; rank {peer} posted as many as always, so later messages met earlier ones and {call} does not end",
        _ENTERED, "", "check the loop around [{line}|this call]: both ends must make the same number of calls"),
    "wrong_peer": Kind("p2p_mismatch", 0.85,
        "{who} [sends?sends to|receives from] rank {peer}, but it is rank {other} that [sends?receives from|sends to] it (group {label})",
        _ENTERED, "", "check the partner that rank {rank} names at [{at}|this call]"),
    "no_partner": Kind("p2p_mismatch", 0.85,
        "{who} wait for each other[posted?, and each comes to what the next one waits for only behind its own wait]: {parts}",
        "{parts_listed}", "",
        "give every send its receive, and post both in one batch_isend_irecv where two ranks exchange"),
    "extra_in_circle": Kind("extra_collective", 0.75,
        "{who} [message?posted|made] an extra {mine}[ at {line}], [only?the only message of this job|as never before], and does not "
        "come to {call}[ ({at})]; {waiting}",
        _ENTERED + "\n[no other send or receive is recorded, and {came} came to that call"
        "|in all earlier rounds rank {rank} came to that call at this point]", "",
        "make the call at [{line}|that line] on all ranks that it needs, or on none"),
    "inversion": Kind("order_inversion", 0.85,
        "{who} enter the groups {groups} in different order and wait for each other: {parts}", "{parts_listed}", _MEMBERS,
        "let all ranks enter these groups in the same order, or in one batch"),
    # ---- a rank whose calls differ from those of the others
    "skipped": Kind("missing_rank", 0.9,
        "{who} skipped {made}[ at {at}][ and {more} behind it], which [{others}|the others] made, and continued[open? to {now_in}]" + _SINCE,
        "{reason}\n{sides}", "[open?whether rank {rank} makes the call behind the one that it is in: then its calls are in another order]",
        "look for a condition, an exception or an early end of a loop that makes rank {rank} skip [{at}|that line]"),
    "extra": Kind("extra_collective", 0.9,
        "{who} made an extra {made}[ at {at}][ and {more} behind it], where [{called}|the others do not make it]"
        "[either? (an extra call, or one of these ranks skipped calls or left its loop early)]" + _SINCE,
        "{reason}\n{sides}", "",
        "make the call on all ranks of the group, or on none: look for a condition on the rank around [{at}|that line]"),
    "swapped": Kind("order_inversion", 0.9,
        "{who} made {one} (#{seq}) before {two} (#{last_seq}) of group {label}, {others} the other way round"
        "[threads?: two threads[ ({names})] use one group, and nothing orders their calls]" + _SINCE,
        "{reason}\n{sides}", "",
        "make these calls in one order on all ranks; a thread beside the training loop needs a group of its own ([{at}|that line])"),
    "other_operation": Kind("type_mismatch", 0.9,
        "{who} called {mine} {part}#{seq} of group {label}[ at {at}], where {those} called {theirs}"
        "[new?; no rank has made this call before: only {ranks} makes it, or {ranks} skipped {missed} at {elsewhere} or left its loop early"
        "|; it had made {made} calls at {elsewhere}, where they make call {rounds}: it skipped {missed} there (a backward, say), "
        "or left its loop early]", "{sides}", "{dumps}", _OTHER_ARGUMENTS),
    "other_arguments": Kind("size_mismatch", 0.9,
        "{who} called {op} {part}#{seq} of group {label}[ at {at}] with {mine}, where {those} had {theirs}",
        "{sides}", "{dumps}", _OTHER_ARGUMENTS),
    "no_majority": Kind("size_mismatch", 0.5,
        "different {aspect} in {op} {part}#{seq} of group {label}: {classes}"
        "[; they called from {both_lines}: one of them skipped a call or made one more]", "{sides}", "{dumps}", _OTHER_ARGUMENTS),
    "other_splits": Kind("size_mismatch", 0.9,
        "[takes?{who} expects {expected} elements of rank {giver} in {op} [{part}]#{seq} of group {label}[ at {at}], which gives it {given}"
        "|[gives?{who}|rank {giver}] gives rank {taker} {given} elements in {op} [{part}]#{seq} of group {label}[ at {at}], but rank {taker} "
        "expects {expected}][ ({more} of ranks {disagree})]", "{sides}", "{dumps}", _OTHER_ARGUMENTS),
    "message_differs": Kind("p2p_mismatch", 0.85,
        "message #{number} from rank {source} to rank {target} of group {label} does not fit: rank {source} sends {sent}, rank {target} "
        "expects {taken}", "", "", "send and receive the same number of elements of the same dtype"),
    "tags_differ": Kind("p2p_mismatch", 0.9,
        "rank {source} sends to rank {target} with tag {sent}, rank {target} receives with tag {taken} (group {label}): the tags differ, "
        "so the message never arrives",
        "[odd?its tag does not continue the order of its earlier tags, the other's does]", "", "use the same tag at both ends"),
    # ---- init_process_group, new_group, destroy_process_group
    "apart": Kind("setup_mismatch", 0.9,
        "{who} called init_process_group with {odd}[ ({line})], {others} with {usual}: they cannot meet"
        "[names? (unless both names mean the same host)]",
        "{said}\n[the environment of rank {changed} said {before} when it started]", "", "give every rank the same {variables}"),
    "never_called": Kind("missing_rank", 0.9,
        "{who} [failed?left {function} with an error and did not call it again|never called {function}]; {inside}"
        "[; {late} is in {now_in}|; the last call of {late} was {last}]"
        "[; world_size is {expected}[ ({line})], and there are files of {started} processes][" + _THERE + "]",
        "{waiters} entered {function}[ at {entered_at}] and did not leave it\n{now_evidence}", f"[now_at?|alive?{_STACKS}]",
        f"[elsewhere?[{_FIND_OUT}]|{_ALL_CALL}]"),
    "never_came_to_init": Kind("not_started", 0.85,
        "{who} never came to {function}[unseen? (no stack and no dump of it)]; {inside}[" + _THERE + "]",
        "{waiters} entered {function}[ at {entered_at}] and did not leave it\n{now_evidence}", f"[now_at?|alive?{_STACKS}]",
        f"[elsewhere?[{_FIND_OUT}]|{_ALL_CALL}]"),
    "ended_before": Kind("missing_rank", 0.9,
        "{who} ended with [clean?exit code 0|{how}] [called?in {function}|before {it} called {function}]; {inside}[" + _THERE + "]",
        "{waiters} entered {function}[ at {entered_at}] and did not leave it\n{now_evidence}", "",
        "[clean?find why the program of {ranks} ended early: it returned, or called sys.exit(0)|check {line}, where rank {worst} ended"
        "|read the log of {ranks}]"),
    "other_members": Kind("order_inversion", 0.85,
        "[tie?{who} called new_group for different members: {named} for {mine}, {others} for {theirs}"
        "|{who} called new_group for {mine}, where {others} called it for {theirs}][; {inside}" + _THERE + "|; {inside}]",
        "[inside?{waiters} entered new_group[ at {entered_at}] and did not leave it]\n{now_evidence}", "", _SAME_GROUPS),
    "left_new_group": Kind("missing_rank", 0.7,
        "{who} left a call of new_group in which the other members of the group still wait; {inside}[" + _THERE + "]",
        "{waiters} entered new_group[ at {entered_at}] and did not leave it\n{now_evidence}", "",
        "compare what {ranks} and {waiters} pass to new_group: members, backend, and the order of the calls"),
    "different_groups": Kind("order_inversion", 0.6,
        "{who} wait in one call of new_group[ ({line})]{times}[, {ahead} in a later one], and no rank is missing: they make groups in different "
        "order or with different members",
        "{waiters} entered new_group and did not leave it",
        "[line?|the lines: run `allranks stacks`; ]the members that each rank passed to new_group: they are not recorded", _SAME_GROUPS),
    "fewer_groups": Kind("missing_rank", 0.8,
        "{who} made {fewer} of new_group fewer than {waiters}, and all of them wait in the next one{times}[" + _THERE + "]",
        "{waiters} entered {function} and did not leave it\n{now_evidence}", f"[now_at?|{_STACKS}]", _ALL_CALL),
    # ---- nothing hangs and nothing misfits
    "ended_badly": Kind("rank_died", 0.6,
        "[accused?{ended} ended with an error that names rank {accused}: {how}|{who} ended with {how}]",
        "{ends}", "", "read the traceback in the log of {ranks}"),
    "same_error": Kind("call_error", 0.9,
        "all {number} ranks ended with the same error at the same line: {what}", "rank {rank} ended with {text}", "",
        "it is not the fault of one rank: read the traceback in the log of any of them"),
    "lost_partner": Kind("rank_died", 0.35,
        "{ended} ended with errors that say a partner was gone: {how}[; there is no file of {absent}]",
        "{ends}", "", "read the traceback in the log of [{absent}|{ended}]"),
    "no_progress": Kind("no_progress", 0.35,
        "no rank is in a collective, and none has made a call for {idle} ({reason}): all of them compute, or they wait for something "
        "else, such as a store, a file or a lock", "", "where the ranks are: run `allranks stacks` on every node"),
    "doubtful": Kind("missing_rank", 0.35,
        "{ranks} is not seen in {call}, in which {entered_by} stand; NCCL marks coalesced calls completed too early: either it never "
        "entered, or its dump is older than the others", "", _SECOND),
    # ---- consequences and warnings
    "follows": Kind("", 0.0, "{waits} in [{op} of {number} {kind} groups|{call}][ for {lacks}]"),
    "folded": Kind("folded", 0.0, "{number} more blocked calls follow from the above"),
    "damaged_file": Kind("damaged_file", 0.0,
        "the file of {ranks} is damaged: what could be read was used, and its end is not held against it"),
    "nothing_read": Kind("damaged_file", 0.0, "nothing to judge: no call could be read from the dumps"),
    "unsafe_pickle": Kind("unsafe_pickle", 0.0, "{path} is not safe to open: it {what} here", "", "",
        "do not open it with pickle, torch.load or torchfrtrace; find out where it comes from"),
    "missing_dump": Kind("missing_dump", 0.0, "no file of {ranks}"),
    "unrecorded": Kind("unrecorded", 1.0,
        "the recorded calls of all ranks fit together, and none is stuck; but gloo's recorder keeps no sends and receives, and this "
        "job makes some: `allranks stacks` shows whether a rank waits in one"),
    "skew": Kind("skew", 0.0,
        "ranks are a few calls apart ({number} unfinished, oldest {oldest}), within this job's usual pauses: {reason}; run again in "
        "{again} to be sure"),
    "pause": Kind("pause", 0.0, "{ranks} declared a pause[ ({phase})] that has not ended: waiting for it is not a hang"),
    "straggler": Kind("straggler", 0.5,
        "{who} is slow, not stuck: in {share} of the last {number} collectives of group {label} it came last, {behind} behind the others "
        "({round} of a round)",
        "lateness per rank: {table}", "what rank {rank} does meanwhile: run `allranks stacks` twice on its node",
        "compare the node of rank {rank} with the others: data loading, clocks, temperature, other jobs"),
}

#: Parts of sentences, and why a rank is the odd one.
PHRASES = {
    "entered": "[receive?posted the receive for rank {waiter}'s {call}|send?posted the send for rank {waiter}'s {call}|entered {call}]",
    "where_now": "where rank {rank} is now: run `allranks stacks[ --pid {pid}]` on [{host}|its node]",
    "last_call_of": "the last call of rank {rank} was {text}",
    "last_call": "{op}[p2p? {direction} [{peer}|any rank]|number? #{seq}] of group {label}[ at {at}][ ({state})]",
    "call": "{op} #{seq} of group {label}",
    "op_at": "{op}[ at {at}]",
    "in_batch": "(call {part} of a batch) ",
    "waited": "{number} {has} waited [at_most?at most ]{wait}",
    "waits_for_it": "{number} {wait} for {it}",
    "waited_in_it": "{number} waited in it",
    "wait_in_it": "{number} [times?[one?has|have] waited in it{times}|{wait} in it]",
    "ended_with": "it ended with {text}",
    "gone": "its process is gone",
    "unread_file": "the file of rank {rank} [damaged?is damaged, and nothing of it could be read|could not be opened] ({path}: {note})",
    "quick_failure": "the others' calls failed long before their timeout, as they do when a peer is gone",
    "others_failed": "the calls of all other ranks failed, its own never ended",
    "unrecorded": "whether one of {ranks} waits for another: the first send or receive between two ranks blocks before NCCL records it, "
        "and only their stacks show which",
    "usual_call": "where in all rounds before it called {op}[ at {at}]",
    "usual_arguments": "with {now}, where in all rounds before it passed {before}",
    "unusual_arguments": "with other arguments than in all rounds before",
    "waits_in": "{waits} in {call}[ at {at}|{lines}][, which lacks {lacking}|first? first]",
    "at_the_end": "when the processes ended: had the job run until it was killed, its ranks were merely a few calls apart",
    "false_completion": "it is marked completed on {done}, but {late} had not entered it even later: NCCL marks coalesced calls completed "
        "too early",
    "file_of": "the file of {ranks}",
    "dump_of": "the dump of {ranks}",
    "examined": "the newest {number} calls of every rank were examined",
    "by_chance": "their calls fitted by chance until #{seq}: {sides}",
    "called_from": "it called from {at}, the others from {elsewhere}: it may be a call that only it makes",
    "also": "[one?1 later collective of the group does not fit either: it follows|{number} later collectives of the group do not fit "
        "either: they follow] from this one",
    # why a rank is the odd one
    "tie": "no majority and no earlier calls show which rank is the odd one",
    "outvoted": "{agree} of {total} ranks agree[; {reason}: a call of one side only, or the end of a loop that came too early or too late]"
        "[; {absent} left no whole file and might turn the majority]",
    "changed_itself": "at the same line it did what the others did until then",
    "left_round": "in all earlier rounds rank {rank} made another call at this point",
    "other_groups": "{number} ranks of other groups agree with the other side at the same line",
    "gloo_aborts": "gloo aborts the rank that gets more than it expects, and a rank is gone",
    "inserted": "rank {rank} never made this call before, and right behind it the one that has always come here",
    "steps": "step marks: rank {rank} entered #{seq} in step {mine}, rank {other} in step {theirs}; in step {step} rank {rank} made {made} of "
        "the group, rank {other} {other_made}",
    "swapped": "rank {rank} made the calls #{seq} and #{last} in the other order than rank {other}",
    "moved": "moved by {count}, its next {agreeing} calls are at the same lines as those of rank {other}",
    "as_always": "rank {rank} continued as in all rounds before, rank {other} did not",
    "here_before": "in [all?all ]rounds before, rank {rank} made here the call that the others make",
    "made_too": "in [all?all ]rounds before, rank {rank} made the call too, and then the one that follows it here",
    "made_more": "in [all?all ]rounds before, rank {rank} made {count} more before the one it is in now",
    "one_line": "in all rounds before, rank {rank} made here {count} of one line and then the one it is in",
    "left_loop": "the others repeat the call, and rank {rank} has stopped: it is in one that [returned?comes behind that loop|it made before them]",
    "all_pairs": "it takes part in [one?the one pair|all {number} pairs] that disagree, and no other rank does",
    "covering": "together these ranks take part in all pairs that disagree",
    "other_totals": "{number} of {total} ranks give and take the same totals, it does not",
    "two_disagree": "only these two disagree, and nothing shows which of them is wrong",
}
# fmt: on

_OPTION = re.compile(r"\[([^\[\]]*)\]")
_CONDITION = re.compile(r"(\w+)\?")
_FIELD = re.compile(r"\{(\w+)\}")
_UNKNOWN = ("", None)


def fill(template: str, facts: Mapping[str, object]) -> str:
    """The template with its facts; see the top of this file."""

    def choose(found: re.Match[str]) -> str:
        for part in found[1].split("|"):
            condition = _CONDITION.match(part)
            text = part[condition.end() :] if condition else part
            wanted = not condition or facts[condition[1]]
            if wanted and not any(facts[name] in _UNKNOWN for name in _FIELD.findall(text)):
                return text
        return ""

    while "[" in template:
        template, found = _OPTION.subn(choose, template)
        if not found:
            break
    return template.format_map(facts)


def say(phrase: str, **facts: object) -> str:
    """A part of a sentence; facts that are not given are unknown."""
    return fill(PHRASES[phrase], defaultdict(str, facts))


def lines(template: str, facts: Mapping[str, object]) -> tuple[str, ...]:
    """The items of a template of several lines."""
    return tuple(line for line in fill(template, facts).split("\n") if line)
