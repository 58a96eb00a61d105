"""Tasks in the background: kept until they end, canceled and waited for together."""

from __future__ import annotations

import asyncio

from tasuki.event_loop import BackgroundTasks


def test_background_tasks_are_kept_until_they_end_and_ended_together() -> None:
    async def main() -> None:
        ended: list[str] = []
        tasks = BackgroundTasks(lambda task: ended.append(task.get_name()))
        go_on = asyncio.Event()
        first = tasks.spawn(go_on.wait())
        second = tasks.spawn(asyncio.Event().wait())
        first.set_name("first")
        second.set_name("second")

        go_on.set()
        assert await first
        await asyncio.sleep(0)
        assert (list(tasks), ended) == ([second], ["first"])

        await tasks.close()
        assert second.cancelled()
        assert (len(tasks), ended) == (0, ["first", "second"])

    asyncio.run(main())


def test_a_task_that_ends_the_others_goes_on_itself() -> None:
    async def main() -> None:
        tasks = BackgroundTasks()
        other = tasks.spawn(asyncio.Event().wait())

        async def end() -> str:
            tasks.cancel()
            await asyncio.sleep(0)
            return "to its end"

        assert await tasks.spawn(end()) == "to its end"
        assert other.cancelled()

    asyncio.run(main())
