"""`python -m tests.support.npu`: fetches the vendor's wheel, once (`wheel.py`)."""

from tests.support.npu.wheel import main

main()
