"""What a coding assistant asks `backlight mcp`: the newest run, its findings, and the page of the first rule.

backlight run --out runs/head examples/new_head.py
python examples/with_mcp.py runs
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

import mcp
from mcp.client.stdio import StdioServerParameters


async def ask(runs: str) -> None:
    """Start the server as an assistant does, and print its answers."""
    command = str(Path(sys.executable).with_name("backlight"))
    server = StdioServerParameters(command=command, args=["mcp", runs])
    async with mcp.Client(mcp.stdio_client(server)) as client:

        async def answer(tool: str, **arguments: str) -> dict[str, Any]:
            result = await client.call_tool(tool, arguments)
            if result.is_error or result.structured_content is None:
                raise SystemExit(str(result.content))
            return result.structured_content

        listed = await answer("list_runs")
        if not listed["recorded"]["runs"]:
            raise SystemExit(f"{runs}: holds no run")
        name = listed["recorded"]["runs"][0]["name"]
        found = await answer("findings", run=name, severity="warning")
        print(f"{name}: {found['recorded']['result']}")
        for finding in found["recorded"]["findings"]:
            print(f"{finding['severity']}: {finding['title']}\n  fix: {finding['fix']}")
        for text in found["not_measured"]:
            print(f"not measured: {text}")
        for finding in found["recorded"]["findings"][:1]:
            page = await answer("rule_documentation", rule=finding["rule"])
            print(page["text"].strip().splitlines()[0])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("runs", help="directory of runs")
    asyncio.run(ask(parser.parse_args().runs))
