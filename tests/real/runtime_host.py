"""Runs in the engine runtime: imports vLLM once, then runs each script that it is given in a fork of its own.

A line of standard input: JSON `[script, [argument, …], what it reads]`, the script being Python code or the path of a file.
A line of standard output: JSON `[status as wait() gives it, standard output, standard error]`.
"""

import gc
import json
import os
import runpy
import signal
import sys
import tempfile
import traceback

SECONDS = 300
"""That a script may take."""


def execute(script, arguments):
    sys.argv = [script, *arguments]
    if "\n" in script:
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(script, run_name="__main__")


def run(script, arguments, given):
    with tempfile.TemporaryFile() as stdin, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        stdin.write(given.encode())
        stdin.seek(0)
        child = os.fork()
        if not child:
            status = 1
            try:
                for number, file in enumerate((stdin, out, err)):
                    os.dup2(file.fileno(), number)
                signal.alarm(SECONDS)
                execute(script, arguments)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = os.waitpid(child, 0)[1]
        out.seek(0)
        err.seek(0)
        return status, out.read().decode(), err.read().decode()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM says while it is imported is no answer
    import vllm.entrypoints.openai.api_server  # noqa: F401

    gc.freeze()
    with os.fdopen(os.dup(0)) as asked:
        for line in asked:
            print(json.dumps(run(*json.loads(line))), file=answers, flush=True)
