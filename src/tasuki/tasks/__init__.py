"""Typed tasks: functions whose calls are jobs, on top of `Client`, `Worker` and its handlers.

    tasks = Tasks("tls://host:7000")          # no url: the server of this folder, an embedded one if there is none

    @tasks.task(retries=5, timeout_s=60)
    def resize(path: str, width: int = 200) -> dict[str, int]: ...

    resize.submit("a.png", width=400).result()        # in any program;  tasuki worker --tasks module:tasks  runs it

    arguments   the payload of a task's job: an object with the arguments by name; its result: the return value
    task        Task: settings, submit and map, the handler that a worker calls; current_job
    tasks       Tasks: the decorator, the client that is opened when it is first used, workers
    eager       jobs that run where they are submitted, for users' tests

Arguments are checked against the annotations by msgspec before they are sent, and again before the function is called. May import
`tasuki.client` and, inside functions, `tasuki.worker`: a program that only submits does not load the worker.
"""
