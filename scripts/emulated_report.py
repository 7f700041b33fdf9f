"""Make the committed report of the emulated Ascend backend, docs/reports/ascend-emulated.{json,md}, anew.

It runs the suite's quick tier twice, on ascend@cpu and on the reference, over the formats that the backend has (two to
four minutes), and puts what ``kvport compare`` says of the two into the page, between its markers. A report is verified
against the manifest, so it is made again whenever cases were added.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

REPORTS = Path(__file__).parents[1] / "docs" / "reports"
FORMATS = (
    "int8",
    "int8:channel:static:scale=bf16",
    "int8:channel:static:scale=fp16",
    "int8:head:static:scale=bf16",
    "int8:head:static:scale=fp16",
    "int8:tensor:static:scale=bf16",
    "int8:tensor:static:scale=fp16",
    "bf16",
)
BEGIN, END = "<!-- made by scripts/emulated_report.py -->", "<!-- end -->"


def run(backend: str, report: Path) -> None:
    # From its own folder and by bare names, so that the recorded command line holds no path of this machine.
    command = ["-m", "pytest", "--pyargs", "kvport_conformance", f"--backend={backend}", "-q", "-p", "no:cacheprovider"]
    options = [f"--formats={','.join(FORMATS)}", f"--report={report.name}"]
    subprocess.run([sys.executable, *command, *options], check=True, cwd=report.parent)


def main() -> int:
    page = REPORTS / "ascend-emulated.md"
    with tempfile.TemporaryDirectory() as folder:
        made, reference = Path(folder, "ascend.json"), Path(folder, "reference.json")
        run("ascend@cpu", made)
        run("reference@cpu", reference)
        compare = [sys.executable, "-m", "kvport", "compare", str(made), str(reference), "--markdown", "-"]
        said = subprocess.run(compare, check=True, capture_output=True, text=True).stdout
        counts = json.loads(made.read_text(encoding="utf-8"))["counts"]
        (REPORTS / "ascend-emulated.json").write_bytes(made.read_bytes())
    before, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    deeper = said.replace("\n## ", "\n### ")  # the page has its own headings above them
    page.write_text(f"{before}{BEGIN}\n\n{deeper}\n{END}{after}", encoding="utf-8")
    print(f"{page}: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
