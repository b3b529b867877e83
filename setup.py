"""Only here for one header: dependants look for the legacy `Home-page` field, which pyproject cannot write."""

from setuptools import setup

setup(url="https://accelerate.example/#independent-implementation-of-the-huggingface-accelerate-interface")
