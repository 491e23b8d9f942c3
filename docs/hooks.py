"""The navigation: `folder/*.md` in mkdocs.yml stands for every page of that folder."""

from pathlib import Path


def on_config(config):
    config.nav = [_expanded(item, Path(config.docs_dir)) for item in config.nav]
    return config


def _expanded(item, folder: Path):
    if isinstance(item, list):
        return [_expanded(part, folder) for part in item]
    if isinstance(item, dict):
        return {title: _expanded(part, folder) for title, part in item.items()}
    if "*" not in item:
        return item
    # The page that lists a folder comes first.
    pages = sorted(folder.glob(item), key=lambda page: (page.stem != "index", page.name))
    return [page.relative_to(folder).as_posix() for page in pages]
