"""What imports ahead of time must leave as it is in a process: source for a kernel.

Random numbers have to be seeded before.
"""

PROCESS_STATE = """
import asyncio, decimal, gc, locale, logging, multiprocessing, os, random, resource, signal, socket
import sys, threading, warnings
import numpy, psutil, torch

OF_TESTS = ('JPY_PARENT_PID', 'IPYTHONDIR', 'TMPDIR')
GUARD = 'PYTORCH_NVML_BASED_CUDA_CHECK'  # by it, torch counts GPUs without touching CUDA

def process_state():
    def loggers(what):
        return sorted((name, str(what(logger)))
                      for name, logger in logging.root.manager.loggerDict.items()
                      if isinstance(logger, logging.Logger) and what(logger)
                      and name != 'nbtrain')
    process = psutil.Process()
    umask = os.umask(0o22)
    os.umask(umask)
    return {
        'signal handlers': {s.name: str(signal.getsignal(s)).split(' at ')[0]
                            for s in signal.Signals},
        'blocked signals': sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        'hooks': [str(hook).split(' at ')[0] for hook in (
            sys.excepthook, sys.displayhook, sys.unraisablehook, sys.breakpointhook,
            threading.excepthook, sys.gettrace(), sys.getprofile(), warnings.showwarning)],
        'rlimits': [resource.getrlimit(getattr(resource, n)) for n in sorted(dir(resource))
                    if n.startswith('RLIMIT_')],
        'environment': {n: v for n, v in os.environ.items()
                        if n not in OF_TESTS and n != GUARD},
        'random numbers': [random.random(), numpy.random.random(), torch.rand(1).item()],
        'threads': sorted(t.name.rstrip('0123456789') for t in threading.enumerate()),
        'threads of the process': process.num_threads(),
        'open files': process.num_fds(),
        'children': len(process.children()),
        'warning filters': [str(f) for f in warnings.filters],
        'logging': (logging.root.level, len(logging.root.handlers), logging.root.manager.disable,
                    loggers(lambda logger: logger.level), loggers(lambda logger: logger.handlers)),
        'Python': (sys.getrecursionlimit(), sys.getswitchinterval(), gc.isenabled(),
                   gc.get_threshold(), len(gc.callbacks), socket.getdefaulttimeout(), umask),
        'decimal': str(decimal.getcontext()), 'locale': locale.setlocale(locale.LC_ALL),
        'asyncio': type(asyncio.get_event_loop_policy()).__name__,
        'multiprocessing': multiprocessing.get_start_method(allow_none=True),
        'torch': [str(value) for value in (
            torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads(),
            torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
            torch.get_float32_matmul_precision(), torch.is_anomaly_enabled(),
            torch.backends.cudnn.benchmark, torch.multiprocessing.get_sharing_strategy())],
        'numpy': (str(numpy.geterr()), str(numpy.get_printoptions())),
    }
"""
