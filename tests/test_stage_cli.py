"""`mu-grpo stage check|repair|show`: what it notices, what it sets aside, and what it never touches."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from helpers import make_tokenizer
from test_stage import fill_stage, flip_bit, make_group, make_manifest, make_row

from mu_grpo_trl import cli
from mu_grpo_trl.stage import StageReader, StageWriter, read_manifest, writer
from mu_grpo_trl.stage.schema import shard_paths


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str]:
    """Exit code, and all that was printed."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["stage", *map(str, argv)])
    printed = capsys.readouterr()
    return int(str(ended.value.code)), printed.out + printed.err


def truncate(shard: Path) -> None:
    shard.write_bytes(shard.read_bytes()[: shard.stat().st_size * 2 // 3])


def flip(shard: Path) -> None:
    flip_bit(shard, 8 * shard.stat().st_size // 2)


def empty(shard: Path) -> None:
    shard.write_bytes(b"")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_sound_stage_passes_and_repairing_it_changes_nothing(tmp_path, capsys):
    fill_stage(tmp_path)
    before = content(tmp_path)
    code, text = run(capsys, "check", tmp_path)
    assert (code, "6 of 6 groups are sound" in text, "wrong" in text) == (0, True, False)
    code, text = run(capsys, "repair", tmp_path)
    assert (code, "Nothing to repair" in text) == (0, True)
    assert content(tmp_path) == before


@pytest.mark.parametrize("damage", [truncate, flip, empty])
def test_a_damaged_shard_is_found_and_repairing_keeps_all_other_groups(tmp_path, capsys, damage):
    manifest = fill_stage(tmp_path)  # groups 0, 1 in the first shard, 5, 2 in the second, 4, 3 in the third
    damaged = shard_paths(tmp_path)[1]
    damage(damaged)
    after_damage = content(tmp_path)

    code, text = run(capsys, "check", tmp_path)
    assert code == 1
    assert f"wrong: {damaged.name}: its bytes do not match" in text
    assert "says complete, but 2 of 6 groups are missing or in a bad shard: 2, 5" in text

    code, text = run(capsys, "repair", "--dry-run", tmp_path)
    assert (code, "would be renamed" in text, "Nothing was changed" in text) == (0, True, True)
    assert content(tmp_path) == after_damage

    code, text = run(capsys, "repair", tmp_path)
    assert (code, "4 groups are kept, 2 are to be generated" in text) == (0, True)
    assert read_manifest(tmp_path) == manifest.with_status("filling")
    assert damaged.with_name(damaged.name + ".rejected").exists()
    assert run(capsys, "check", tmp_path)[0] == 0

    restarted = StageWriter.resume(tmp_path, manifest)
    assert restarted.done_groups == {0, 1, 3, 4}
    restarted.append([make_group(2), make_group(5)])
    restarted.complete()
    assert len(StageReader(tmp_path, verify=True)) == 6


def test_a_removed_shard_and_leftovers_are_named(tmp_path, capsys):
    fill_stage(tmp_path)
    shard_paths(tmp_path)[0].unlink()
    (tmp_path / "groups" / "r0-000009.arrow.tmp").write_bytes(b"part")
    code, text = run(capsys, "check", tmp_path)
    assert (code, "2 of 6 groups are missing or in a bad shard: 0, 1" in text) == (1, True)
    assert "left over, harmless: groups/r0-000009.arrow.tmp" in text
    assert run(capsys, "repair", tmp_path)[0] == 0
    assert list((tmp_path / "groups").glob("*.tmp")) == []
    assert read_manifest(tmp_path).status == "filling"


def test_a_shard_of_another_stage_and_one_with_groups_twice_are_set_aside(tmp_path, capsys):
    fill_stage(tmp_path / "ours")
    fill_stage(tmp_path / "other", make_manifest(seed=7))
    foreign = shard_paths(tmp_path / "other")[0]
    copied = tmp_path / "ours" / "groups" / foreign.name.replace("r0-", "r1-")
    copied.write_bytes(foreign.read_bytes())
    first = shard_paths(tmp_path / "ours")[0]
    again = first.with_name(first.name.replace("r0-", "r2-"))
    again.write_bytes(first.read_bytes())
    code, text = run(capsys, "check", tmp_path / "ours")
    assert (code, "the stage with fingerprint" in text, "group 0 is in another shard too" in text) == (1, True, True)
    code, text = run(capsys, "repair", tmp_path / "ours")
    assert (code, "6 groups are kept, 0 are to be generated" in text) == (0, True)
    assert read_manifest(tmp_path / "ours").status == "complete"
    assert len(StageReader(tmp_path / "ours", verify=True)) == 6


WRONG = {
    "sample 1: a behavior log-prob above 0": {"completion_ids": [1, 2], "behavior_logps": [-1.0, 3.0]},
    "sample 1: none of its behavior log-probs is usable": {"completion_ids": [1], "behavior_logps": [-9999.0]},
    "sample 1: its advantage is not finite": {"advantage": float("nan")},
    "sample 1: an advantage without a reward": {"reward": None, "advantage": 1.0},
    "sample 1: its finish_reason is none of": {"finish_reason": "abort"},
    "sample 1: a negative token id": {"completion_ids": [-3], "behavior_logps": [-1.0]},
}


@pytest.mark.parametrize("message", WRONG)
def test_rows_that_no_writer_of_ours_would_write_are_found_and_set_aside(tmp_path, capsys, monkeypatch, message):
    def as_arrays(group, manifest):
        return dataclasses.replace(group, responses=[writer.ResponseRow(*map_row(row)) for row in group.responses])

    def map_row(row):
        ids, logps = writer.np.asarray(row.completion_ids, "int32"), writer.np.asarray(row.behavior_logps, "float32")
        return ids, logps, row.rewards, row.reward, row.advantage, row.finish_reason

    fill = StageWriter.create(tmp_path, make_manifest())
    fill.append([make_group(group) for group in (0, 1, 2)])
    with monkeypatch.context() as unchecked:
        unchecked.setattr(writer, "_checked_group", as_arrays)
        fill.append([make_group(3, [make_row(3, 0), make_row(3, 1, **WRONG[message])]), make_group(4), make_group(5)])
    fill.complete()
    code, text = run(capsys, "check", tmp_path)
    assert (code, f"group 3 {message}" in text) == (1, True), text
    code, text = run(capsys, "repair", tmp_path)
    assert (code, "3 groups are kept, 3 are to be generated" in text) == (0, True)
    assert read_manifest(tmp_path).status == "filling"


def test_a_lost_manifest_cannot_be_made_up_and_the_shards_stay(tmp_path, capsys):
    fill_stage(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    before = content(tmp_path)
    for command in ("check", "repair"):
        code, text = run(capsys, command, tmp_path)
        assert (code, "Start the run again with its own settings" in text) == (2, True)
    assert content(tmp_path) == before


def test_a_stage_that_is_being_filled_is_checked_but_not_repaired(tmp_path, capsys):
    filling = StageWriter.create(tmp_path, make_manifest())
    filling.append([make_group(0)])
    code, text = run(capsys, "check", tmp_path)
    assert (code, "5 groups are still to be generated" in text) == (0, True)
    truncate(shard_paths(tmp_path)[0])
    code, text = run(capsys, "repair", tmp_path)
    assert (code, "is being filled by another writer" in text) == (2, True)
    assert len(shard_paths(tmp_path)) == 1


def test_a_wrong_path_is_told_with_the_stages_below_it(tmp_path, capsys):
    code, text = run(capsys, "check", tmp_path / "nothing")
    assert (code, "nothing is no folder" in text) == (2, True)
    fill_stage(tmp_path / "run" / "stages" / "stage-000")
    code, text = run(capsys, "show", tmp_path / "run")
    assert (code, "run/stages/stage-000" in text) == (2, True)


def test_show_tells_what_a_stage_is_with_its_responses_as_text(tmp_path, capsys):
    fill_stage(tmp_path)
    code, text = run(capsys, "show", tmp_path)
    assert code == 0
    assert "6 of 6 groups × 2 responses, 2 updates of 3 groups" in text
    assert "reward: mean 1.000 (accuracy 0.500, format 0.500)" in text
    assert "cut at the limit 50.0%" in text
    assert "[100, 101, 102]" in text  # no tokenizer: ids
    tokenizer = make_tokenizer()
    manifest = make_manifest(num_updates=1, prompts_per_update=1, prompt_indices=(10,))
    spoken = StageWriter.create(tmp_path / "spoken", manifest)
    ids = tokenizer("4=2+2")["input_ids"]
    rows = [make_row(0, s, completion_ids=ids, behavior_logps=[-1.0] * len(ids)) for s in range(2)]
    spoken.append([make_group(0, rows, prompt_ids=tokenizer("2+2=")["input_ids"])])
    spoken.complete()
    tokenizer.save_pretrained(tmp_path / "spoken" / "policy")
    code, text = run(capsys, "show", tmp_path / "spoken", "--group", 0)
    assert (code, text.count(">>> 4=2+2")) == (0, 2)
    assert "\n2+2=\n" in text
