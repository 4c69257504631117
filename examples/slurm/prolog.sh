#!/bin/bash
# A health check before every job. In slurm.conf:
#   Prolog=/etc/slurm/allranks_prolog.sh
# Slurm drains the node and requeues the job when this exits with anything but 0. `allranks doctor` exits with
# 0 when nothing is wrong or there are only warnings, 1 when a check failed, 2 when it could not check.
# Only a failed check drains the node; a broken installation of allranks should not empty a cluster.
ALLRANKS=${ALLRANKS:-/opt/allranks/bin/allranks}
LOG=${ALLRANKS_PROLOG_LOG:-/var/log/slurm/allranks-prolog.log}

timeout 60 "$ALLRANKS" doctor --checkpoint-folder "${CHECKPOINT_FOLDER:-/scratch}" >"$LOG" 2>&1
[ $? -eq 1 ] && exit 1
exit 0
