"""Build the site of the documents: `make site`. zensical reads the pages of `site_pages` and checks links."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

from site_pages import COPIED, ROOT, build_pages

#: Folders of the pages as Markdown, and of the site.
BUILD = ROOT / "build"
PAGES, SITE = BUILD / "site-pages", BUILD / "site"
#: Pages of the navigation, in the order in which a newcomer reads them.
TUTORIAL = ("find-the-bug", "read-a-checkpoint", "compare-two-epochs", "gate-in-ci")
REFERENCE = ("exit-status", "outputs", "configuration", "lock-file", "baseline", "urls", "executors", "platforms")
HOW_TOS = (
    "load-state-dict-fails",
    "browse-a-checkpoint",
    "repair-a-model",
    "check-a-download",
    "find-the-biggest-tensors",
    "check-frozen-layers",
    "what-was-done",
    "follow-a-run",
    "check-a-resume",
    "lock-a-release",
    "test-with-pytest",
    "own-rules",
    "notebooks-and-training",
    "ci",
    "git",
    "scripts",
    "one-terabyte",
    "split-the-work",
)
EXPLANATIONS = ("registered", "pickles", "fake-gpu", "audit-limits", "security", "comparison", "scale")


def main() -> int:
    """Write the pages, build the site, and return the exit status of zensical."""
    for folder in (PAGES, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    for name, text in build_pages().items():
        path = PAGES / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")
    shutil.copytree(ROOT / "docs" / "pictures", PAGES / "pictures")
    write_schemas()
    # JSON is YAML too.
    (BUILD / "mkdocs.yml").write_text(json.dumps(build_config(), indent=1), "utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "zensical", "build", "--strict", "--clean"]
    done = subprocess.run([*command, "--config-file", str(BUILD / "mkdocs.yml")], check=False)  # noqa: S603
    if done.returncode == 0:
        print(f"file://{SITE}/index.html")
    return done.returncode


def write_schemas() -> None:
    """Write each schema to the path that its `$id` names."""
    from statecli.core.documentation import DOCUMENTATION_URL, schema_url
    from statecli.report.documents.schemas import DOCUMENTS, encode_schema, get_version

    for name in DOCUMENTS:
        path = PAGES / schema_url(name, get_version(name)).removeprefix(DOCUMENTATION_URL)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode_schema(name))


def build_config() -> dict[str, object]:
    """Return the configuration of the site. Nothing is loaded from the network: no fonts, no scripts."""
    from statecli.core.documentation import DOCUMENTATION_URL

    colors = (("light", "default", "night", "dark"), ("dark", "slate", "sunny", "light"))
    return {
        "site_name": "statecli",
        "site_url": DOCUMENTATION_URL,
        "site_description": "See, prove and audit the state of PyTorch models and checkpoints",
        "docs_dir": PAGES.name,
        "site_dir": SITE.name,
        "use_directory_urls": False,
        "nav": build_nav(),
        "theme": {
            "name": "material",
            "font": False,
            "features": ["navigation.tabs", "navigation.indexes", "navigation.footer", "content.code.copy"],
            "palette": [
                {
                    "media": f"(prefers-color-scheme: {scheme})",
                    "scheme": name,
                    "toggle": {"icon": f"lucide/{'moon' if icon == 'night' else 'sun'}", "name": f"Switch to {other}"},
                }
                for scheme, name, icon, other in colors
            ],
        },
        "markdown_extensions": [*EXTENSIONS, {"toc": {"permalink": True}}],
        "plugins": [
            "search",
            {"mkdocstrings": {"handlers": {"python": {"paths": [str(ROOT)], "options": API_OPTIONS}}}},
        ],
    }


EXTENSIONS = ("tables", "def_list", "attr_list", "md_in_html", "pymdownx.highlight", "pymdownx.superfences")
API_OPTIONS = {
    "docstring_style": "google",
    "show_source": False,
    "show_root_heading": True,
    "show_root_full_path": False,
    "heading_level": 3,
    "members": [],
    "separate_signature": True,
    "show_signature_annotations": True,
    "signature_crossrefs": False,
    "line_length": 100,
}


def build_nav() -> list[dict[str, object]]:
    """Return the navigation: the parts of the documents in the order in which a newcomer reads them."""
    from statecli.requests.options import COMMANDS

    def section(folder: str, *names: str) -> list[str]:
        return [f"{folder}/{name}.md" for name in names]

    formats = sorted(path.stem for path in (ROOT / "docs" / "reference" / "formats").glob("*.md"))
    commands = [name.replace(" ", "-") for name in COMMANDS]
    return [
        {"Home": "index.md"},
        {"Tutorial": section("tutorial", "index", *TUTORIAL)},
        {"How to": section("how-to", "index", *HOW_TOS)},
        {
            "Reference": [
                {"Commands": section("reference/commands", "index", *commands)},
                {"Rules": ["reference/rules/index.md"]},
                {"Formats": section("reference/formats", "index", *formats)},
                *section("reference", *REFERENCE),
                {"Schemas": section("reference/schemas", "index")},
                *section("reference", "python", "sample-models", "benchmarks", "glossary"),
            ]
        },
        {"Explanation": section("explanation", "index", *EXPLANATIONS)},
        {"Contributing": [*COPIED.values()]},
    ]


if __name__ == "__main__":
    raise SystemExit(main())
