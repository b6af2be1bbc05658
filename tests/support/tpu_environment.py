"""Environment variables of hosts with a TPU."""

from __future__ import annotations

KAGGLE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_CHIPS_PER_HOST_BOUNDS": "2,4,1",
    "TPU_WORKER_HOSTNAMES": "localhost",
}

STALE = {
    "CLOUD_TPU_TASK_ID": "0",
    "TPU_PROCESS_ADDRESSES": "local",
    "TPU_PROCESS_BOUNDS": "1,1,1",
    "TPU_VISIBLE_CHIPS": "0",
    "PJRT_LOCAL_PROCESS_RANK": "0",
}
