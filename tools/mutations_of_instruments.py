"""Errors that a refactoring or a hasty change might make in the instruments, and what catches each."""

from __future__ import annotations

from typing import Final

from mutation import Mutation

OF_CHECKS = (
    Mutation(
        "a confident start at twice the variance",
        "checks/start.py",
        {"variance > 2 * even": "variance > 4 * even"},
        own=(
            "tests/checks/test_start.py::test_a_start_is_confident_from_the_variance_on_at_which_one_class_outweighs_all",
        ),
    ),
    Mutation(
        "padding in the loss of a start",
        "checks/start.py",
        {"targets.nll.reshape(-1)[counted].mean()": "targets.nll.mean()"},
        own=("tests/checks/test_start.py::test_targets_that_are_not_counted_hide_no_confident_start",),
    ),
    Mutation(
        "causality in evaluation alone",
        "checks/tokens.py",
        {"for training in (False, True):": "for training in (False,):"},
        own=("tests/checks/test_tokens.py::test_a_token_that_is_seen_ahead_in_training_alone_is_named",),
    ),
    Mutation(
        "a document's end one target late",
        "checks/tokens.py",
        {"numbers[:, 1:] != numbers[:, :-1], (0, 1))": "numbers[:, 1:] != numbers[:, :-1], (1, 0))"},
        own=(
            "tests/checks/test_tokens.py::test_a_loss_that_asks_for_the_beginning_of_the_next_document_is_noted",
        ),
    ),
    Mutation(
        "a bonus that is never unexplained",
        "checks/loss.py",
        {"    if abs(unexplained) <= max(": "    if unexplained <= max("},
        own=("tests/checks/test_loss.py::test_a_bonus_without_a_gradient_fails_as_a_penalty_does",),
    ),
    Mutation(
        "a derivative in evaluation alone",
        "checks/gradients.py",
        {
            "    trace = step.exact if step.running_statistics else step.training\n    if _runs_without": (
                "    trace = step.exact\n    if _runs_without"
            )
        },
        own=("tests/checks/test_gradients.py::test_a_wrong_backward_in_training_alone_is_named",),
    ),
    Mutation(
        "rows without columns",
        "checks/gradients.py",
        {"        for axis in (0, 1):": "        for axis in (0,):"},
        own=("tests/checks/test_gradients.py::test_columns_of_a_matrix_that_read_nothing_are_named",),
    ),
    Mutation(
        "beta1 without its square",
        "checks/optimizers.py",
        {"float(betas[0]) ** 2 >= float(betas[1])": "float(betas[0]) >= float(betas[1])"},
        own=(
            "tests/checks/test_optimizers.py::test_one_group_layerwise_rates_and_muon_on_hidden_matrices_are_sound",
        ),
    ),
    Mutation(
        "every group at the rate that is asked for",
        "checks/optimizers.py",
        {"and all(abs(rate - asked)": "and any(abs(rate - asked)"},
        own=("tests/checks/test_optimizers.py::test_the_rate_that_was_asked_for_may_be_that_of_one_group",),
    ),
    Mutation(
        "a gradient that is never too small",
        "checks/step.py",
        {"abs(match.factor / allowed - 1)": "match.factor / allowed - 1"},
        own=("tests/checks/test_step.py::test_a_faulty_step_is_named",),
    ),
    Mutation(
        "a rate that is multiplied once in ten steps",
        "checks/schedule.py",
        {"0.5 < worst**LEARNT < 2": "0.5 < worst < 2"},
        own=("tests/checks/test_schedule.py::test_factors_that_every_step_multiplies_once_more_are_named",),
    ),
    Mutation(
        "a stream without its dropout",
        "checks/structure.py",
        {"step.exact.again(training=True, dropout=True)": "step.exact.again(training=True)"},
        own=("tests/checks/test_structure.py::test_a_block_that_does_not_pass_its_stream_on_fails",),
    ),
)

OF_TRACE = (
    Mutation(
        "rounding of the finest type",
        "trace/compare.py",
        {"eps = max(torch.finfo(p.dtype).eps": "eps = min(torch.finfo(p.dtype).eps"},
        own=("tests/trace/test_facts.py::test_parameters_are_rounded_as_the_coarsest_of_their_types",),
    ),
    Mutation(
        "rounding of float64 for a step in float32",
        "trace/whole_step.py",
        {"if self.two_runs.exact and not self._comparison.narrowed:": "if not self._comparison.narrowed:"},
        own=(
            "tests/checks/test_step.py::test_a_step_that_insists_on_its_precision_is_compared_up_to_its_rounding",
        ),
    ),
    Mutation(
        "a batch learnt without a warm-up",
        "trace/dry_run.py",
        {"rates=[ramp * rate for rate in rates]": "rates=list(rates)"},
        own=("tests/checks/test_step.py::test_a_small_batch_is_learnt_at_rates_that_rise_over_ten_steps",),
    ),
    Mutation(
        "a resumed schedule counted from 0",
        "trace/rates.py",
        {
            "rates_at = _rates_by_closed_form(groups, scheduler, closed, start)": "rates_at = "
            "_rates_by_closed_form(groups, scheduler, closed, 0)"
        },
        own=(
            "tests/checks/test_schedule.py::test_rates_far_ahead_of_a_resumed_schedule_are_counted_from_its_first_step",
        ),
    ),
    Mutation(
        "a peak where a schedule was sampled",
        "trace/rates.py",
        {"with_peaks[peak] = rates_at(peak)": "pass"},
        own=("tests/checks/test_schedule.py::test_a_narrow_peak_between_samples_is_found",),
    ),
    Mutation(
        "a level for each comparison",
        "trace/starts.py",
        {"inv_cdf(1 - LEVEL / 2 / max(compared, 1))": "inv_cdf(1 - LEVEL / 2)"},
        own=(
            "tests/checks/test_start.py::test_a_declared_deviation_is_compared_at_a_level_that_all_comparisons_share",
        ),
    ),
    Mutation(
        "the row of padding moved with the others",
        "trace/finite_differences.py",
        {"row = rows.get(id(parameters[name]))": "row = rows.get(name)"},
        own=(
            "tests/checks/test_gradients.py::test_the_row_of_padding_keeps_the_gradient_that_a_lookup_drops",
        ),
    ),
    Mutation(
        "a difference over half its distance",
        "trace/finite_differences.py",
        {"(up - down) / (2 * h)": "(up - down) / h"},
        own=("tests/checks/test_gradients.py::test_they_hold_for_a_sound_model",),
    ),
    Mutation(
        "the logits of another batch",
        "trace/comparison.py",
        {"value = logits.value if trace is self._passes.exact else logits.of(trace)": "value = logits.value"},
        own=("tests/checks/test_tokens.py::test_a_token_that_is_seen_ahead_in_training_alone_is_named",),
    ),
    Mutation(
        "one draw of a choice among a few",
        "trace/comparison.py",
        {"seeds = SEEDS if self._takes_random_numbers() else SEEDS[:1]": "seeds = SEEDS[:1]"},
        own=(
            "tests/checks/test_drawn.py::test_a_choice_that_comes_out_the_same_twice_is_drawn_all_the_same",
        ),
    ),
    Mutation(
        "weights that the next change forgets",
        "trace/trace.py",
        {'{**self.weights, **changes["weights"]}': 'dict(changes["weights"])'},
        own=("tests/trace/test_trace.py::test_weights_that_a_further_change_does_not_name_stay",),
    ),
    Mutation(
        "the state of numpy left as it is",
        "trace/restore.py",
        {"        stack.callback(numpy.random.set_state, numpy.random.get_state())  # noqa: NPY002\n": ""},
        own=("tests/trace/test_restore.py::test_random_states_are_put_back",),
    ),
    Mutation(
        "one mode for all modules",
        "trace/patching.py",
        {"modes = [(module, module.training) for": "modes = [(module, model.training) for"},
        own=("tests/trace/test_restore.py::test_a_module_that_has_a_mode_of_its_own_gets_it_back",),
    ),
    Mutation(
        "a second moment without its correction",
        "trace/update_rules.py",
        {"((v / (1 - b2**t)).sqrt()": "(v.sqrt()"},
        own=("tests/checks/test_optimizers.py::test_they_hold_for_sorted_groups",),
    ),
    Mutation(
        "weights without their label smoothing",
        "trace/facts/targets.py",
        {"fit.on_target + fit.uniform * classes": "fit.on_target"},
        own=("tests/trace/test_facts.py::test_targets_are_read_off_the_gradient",),
    ),
    Mutation(
        "an index one past the table",
        "trace/lookups.py",
        {"if not first <= entry < size:": "if not first <= entry <= size:"},
        own=("tests/trace/test_lookups.py",),
    ),
)

OF_TRIALS = (
    Mutation(
        "the last loss for the mean of eight",
        "trials/search.py",
        {"return fmean(losses[-LAST:])": "return losses[-1]"},
        own=("tests/trials/test_search.py",),
    ),
    Mutation(
        "half a unit for half a nat",
        "trials/search.py",
        {"ABOVE_START_NATS * nats": "ABOVE_START_NATS"},
        own=("tests/trials/test_search.py",),
    ),
    Mutation(
        "a share of the best loss for that of what it learns",
        "trials/search.py",
        {"USABLE * max(reference - best, 0.0)": "USABLE * best"},
        own=("tests/trials/test_search.py",),
    ),
    Mutation(
        "noise that makes a rate worse",
        "trials/search.py",
        {"scores[rate] - SURE * errors.get(rate, 0.0)": "scores[rate]"},
        own=("tests/trials/test_search.py",),
    ),
    Mutation(
        "the spread of a loss for its error",
        "trials/verdict.py",
        {"stdev(gaps) / len(gaps) ** 0.5": "stdev(gaps)"},
        own=("tests/trials/test_verdict.py",),
    ),
    Mutation(
        "the shorter of eight losses and a tenth",
        "trials/verdict.py",
        {"self.losses[-max(LAST, self.steps // 10) :]": "self.losses[-min(LAST, self.steps // 10) :]"},
        own=("tests/trials/test_verdict.py",),
    ),
    Mutation(
        "a fall within one error",
        "trials/verdict.py",
        {"> 2 * error": "> error"},
        own=("tests/trials/test_verdict.py",),
    ),
    Mutation(
        "errors in the unit of the loss",
        "trials/verdict.py",
        {"t.error(self.best) / self.scale.weight": "t.error(self.best)"},
        own=("tests/trials/test_verdict.py",),
    ),
    Mutation(
        "something learnt within the noise",
        "trials/scale.py",
        {"loss < self.start - 3 * noise": "loss < self.start - noise"},
        own=(
            "tests/trials/test_scale.py::test_weights_that_were_trained_before_are_compared_with_their_start",
        ),
    ),
    Mutation(
        "twice as many targets",
        "trials/scale.py",
        {".classes - 1) / 2 <= BIAS_NATS": ".classes - 1) <= BIAS_NATS"},
        own=("tests/trials/test_scale.py::test_targets_are_read_until_their_entropy_is_known",),
    ),
    Mutation(
        "targets counted without their weights",
        "trials/scale.py",
        {".reshape(-1).double())": ".reshape(-1).double().sign())"},
        own=("tests/trials/test_scale.py::test_a_target_counts_as_the_loss_weighs_it",),
    ),
    Mutation(
        "the rate of the step before",
        "trials/training.py",
        {"rate_of(batch + 1, ": "rate_of(batch, "},
        own=(
            "tests/trials/test_training.py::test_rates_are_given_after_the_scheduler_set_them_and_groups_keep_their_proportion",
        ),
    ),
    Mutation(
        "rates left as a trial gave them",
        "trials/training.py",
        {'group["lr"] = lr\n': "pass\n"},
        own=("tests/trials/test_training.py::test_a_schedule_that_multiplies_the_last_rate_stays_right",),
    ),
    Mutation(
        "a warm-up that is not scaled to the trial",
        "trials/attempts.py",
        {"warmup=warmup / (setup.declare.steps or steps)": "warmup=warmup / steps"},
        own=("tests/trials/test_trial.py::test_a_warm_up_that_is_changed_is_of_the_planned_steps",),
    ),
)

OF_JUDGING = (
    Mutation(
        "intervals that hold for one pair alone",
        "judging/statistics.py",
        {"LEVEL / 2 / np.maximum(self.pairs, 1)": "LEVEL / 2"},
        own=("tests/judging/test_seeds.py",),
    ),
    Mutation(
        "a p of one side",
        "judging/statistics.py",
        {"2 * self.pairs * student_t.sf": "self.pairs * student_t.sf"},
        own=("tests/judging/test_seeds.py",),
    ),
    Mutation(
        "an error over the degrees of freedom",
        "judging/statistics.py",
        {"np.sqrt(np.maximum(self.common, 1))": "np.sqrt(np.maximum(self.freedom, 1))"},
        own=("tests/judging/test_seeds.py",),
    ),
    Mutation(
        "a variance over n",
        "judging/statistics.py",
        {"axis=-1) / (number - 1)": "axis=-1) / number"},
        own=("tests/judging/test_seeds.py",),
    ),
    Mutation(
        "exchanges without those as large as what is seen",
        "judging/statistics.py",
        {">= seen - _ROUNDING": "> seen + _ROUNDING"},
        own=(
            "tests/judging/test_randomisation.py::test_one_different_sentence_proves_nothing_to_randomisation",
        ),
    ),
    Mutation(
        "the narrow end of a gap",
        "judging/statistics.py",
        {"few, many = _ends(": "many, few = _ends("},
        own=("tests/judging/test_trains.py",),
    ),
    Mutation(
        "each look as if it were the first",
        "judging/boundary.py",
        {"tail = chance if is_first else self._tail_of(chance, seeds)": "tail = chance"},
        own=("tests/judging/test_sequential.py::test_chances_are_spent_as_they_should_be",),
    ),
    Mutation(
        "the whole level for each of two questions",
        "judging/sequential.py",
        {"boundary((1 - OF_TRAINING) * level)": "boundary(level)"},
        own=("tests/judging/test_sequential.py::test_the_question_of_training_has_a_share_of_the_level",),
    ),
    Mutation(
        "a discard at the level of a keep",
        "judging/sequential.py",
        {"only_baseline >= streak(LEVEL)": "only_baseline >= streak(self.level)"},
        own=(
            "tests/judging/test_sequential.py::test_a_lower_level_keeps_later_what_trains_more_often_and_discards_as_soon_what_does_not",
        ),
    ),
    Mutation(
        "more seeds that decide in half of the cases",
        "judging/sequential.py",
        {"critical(level, seeds) + ndtri(POWER)": "critical(level, seeds)"},
        own=("tests/judging/test_sequential.py::test_more_seeds_decide_in_four_of_five_cases",),
    ),
    Mutation(
        "hopeless as soon as what is seen would not be decided",
        "judging/sequential.py",
        {"(side * above + error) / spread": "side * above / spread"},
        own=(
            "tests/judging/test_sequential.py::test_a_gain_that_an_error_more_would_decide_is_not_hopeless",
        ),
    ),
    Mutation(
        "a loss that is hopeless to discard",
        "judging/sequential.py",
        {"((1, self.level), (-1, LEVEL))": "((1, self.level), (1, LEVEL))"},
        own=(
            "tests/judging/test_sequential.py::test_a_gain_that_an_error_more_would_decide_is_not_hopeless",
        ),
    ),
    Mutation(
        "the noise of a pair for that of one run",
        "judging/judge.py",
        {"spread = noise / 2**0.5": "spread = noise"},
        own=("tests/judging/test_judge.py::test_noise_and_power_are_those_of_the_scores",),
    ),
    Mutation(
        "a missing run taken for one that failed",
        "judging/judge.py",
        {
            "change.trained * reference.ended - reference.trained * change.ended": (
                "change.trained - reference.trained"
            )
        },
        own=("tests/judging/test_judge.py::test_a_verdict_is_where_the_whole_interval_lies",),
    ),
    Mutation(
        "one pair's p among several",
        "judging/answers.py",
        {"min(1.0, pairs * statistics.fisher(*counts))": "statistics.fisher(*counts)"},
        own=("tests/judging/test_judge.py::test_how_often_each_trains_is_corrected_for_the_number_of_pairs",),
    ),
    Mutation(
        "an effect in deviations of a difference",
        "judging/answers.py",
        {"effect_on_scale * 2**0.5 / spread": "effect_on_scale / spread"},
        own=("tests/judging/test_judge.py::test_an_open_difference_says_how_many_seeds_would_show_it",),
    ),
    Mutation(
        "a gain measured again on the seeds that decided",
        "judging/experimenter.py",
        {"range(self.seeds.stop, self.seeds.stop +": "range(self.seeds.start, self.seeds.start +"},
        own=(
            "tests/judging/test_ledger.py::test_proposals_are_entered_with_their_levels_and_a_keep_is_measured_again",
        ),
    ),
)

INSTRUMENTS: Final[tuple[Mutation, ...]] = (*OF_CHECKS, *OF_TRACE, *OF_TRIALS, *OF_JUDGING)
