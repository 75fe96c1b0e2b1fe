"""What the metrics of the policy loss and of its penalties mean, with their usual ranges."""

from megatron_rl_corr.core.metric_spec import MetricSpec, UsualRange, in_group

METRICS = in_group(
    "Loss and gradient",
    MetricSpec(
        "loss/policy",
        "policy loss, mean over kept tokens whatever the aggregation; its level says little",
    ),
    MetricSpec("loss/clip_fraction", "tokens whose policy ratio was clipped", "clipped tokens / kept tokens"),
    MetricSpec(
        "loss/dual_clip_fraction",
        "tokens of negative advantage whose loss the dual clip bounded",
        "tokens at c |A| / kept tokens",
    ),
    MetricSpec(
        "loss/sat_tail_fraction",
        "tokens whose |D| is in the batch's tail, so that their clip is narrower",
        "tokens of |D| > X mean |D| / kept tokens",
        only_with="--rollout-clip-sat-tail",
    ),
    MetricSpec(
        "loss/sat_clip_fraction",
        "tokens whose policy ratio the narrower clip bounded, and PPO's would not have",
        "tokens clipped by SAT alone / kept tokens",
        only_with="--rollout-clip-sat-tail",
    ),
    MetricSpec(
        "loss/old_new_k3_kl",
        "distance of the policy from pi_old, k3 estimate; 0 with three policies, one update a batch",
        clamped="at most 10 a token",
    ),
    MetricSpec(
        "loss/entropy", "entropy of the policy per token; a fall to 0 is collapse", "mean(-sum p log p)"
    ),
    MetricSpec(
        "loss/reference_kl",
        "KL to the reference policy, as the penalty estimates it; 0 before the first update",
        "mean over kept tokens",
        "reference KL",
        UsualRange(
            "the policy is far from its reference, or reward pulls it away",
            "Up to 0.1 a token is usual. If the reward still rises, the reference may be too old: "
            "--rollout-reference-reset N makes it the policy of every N-th batch. If it does not, raise "
            "--rollout-kl-loss-coef, or lower the learning rate. With --rollout-reference-url it can't fall "
            "below reference/floor.",
            high=0.5,
        ),
        only_with="--rollout-kl-loss-coef",
    ),
    MetricSpec(
        "reference/floor",
        "k3 of the start's weights against the servers of the reference, over the first step",
        "mean(e^-d - 1 + d) over sampled tokens, d = log pi_start - log pi_server",
        only_with="--rollout-reference-url",
        usual=UsualRange(
            "the servers have other weights than the start or compute otherwise",
            "If they are meant to be the start: the same checkpoint, number type and lm_head as the "
            "trainer, and see KL(k3), which has the same causes. If they are another policy, the value says "
            "how far it is.",
            high=1e-2,
        ),
    ),
    MetricSpec(
        "loss/reference_missing",
        "kept tokens that the reference gave no finite log-prob for: they have no penalty",
        "count",
        only_with="--rollout-kl-loss-coef",
        usual=UsualRange(
            "tokens train without the penalty",
            "With --rollout-reference-url look at the log of those servers, else for overflow in the "
            "reference's logits.",
            low=0,
            high=0,
        ),
    ),
    MetricSpec(
        "loss/distill_kl",
        "reverse KL to the teacher per token, estimated as it is trained; falls to 0 as they agree",
        "mean over kept tokens of l_y; with K ids of the KL over them plus l_y - c outside of them",
        "KL to the teacher",
        only_with="--rollout-distill-coef",
    ),
    MetricSpec(
        "loss/distill_missing",
        "kept tokens that the teacher gave no finite log-prob for: it adds nothing to them",
        "count",
        only_with="--rollout-distill-coef",
        usual=UsualRange(
            "tokens train without the teacher",
            "Look at the log of the servers of --rollout-teacher-url.",
            low=0,
            high=0,
        ),
    ),
    MetricSpec(
        "loss/distill_top_kl",
        "the part of it over the teacher's K likeliest ids, and the rest as one outcome",
        "mean over kept tokens of sum_H p l + P log(P / Q)",
        only_with="--rollout-distill-top-k",
    ),
    MetricSpec(
        "loss/distill_student_mass",
        "probability under the policy of the K ids that the teacher finds likeliest",
        "mean over kept tokens of sum_H p",
        only_with="--rollout-distill-top-k",
        usual=UsualRange(
            "much of the KL is sampled and not computed",
            "Usual at the start, where the policy is far from the teacher. If it stays: raise "
            "--rollout-distill-top-k.",
            low=0.5,
        ),
    ),
    MetricSpec(
        "loss/distill_teacher_mass",
        "probability under the teacher of its K likeliest ids",
        "mean over kept tokens of sum_H t",
        only_with="--rollout-distill-top-k",
    ),
    MetricSpec(
        "loss/centering_drift",
        "size of the drift that score centering removes, as the mismatch of the ids' masses",
        "mean over kept tokens of sum_H |m - alpha p|",
        only_with="--rollout-score-centering",
        usual=UsualRange(
            "the model of the ids outside of H outweighs the ids inside",
            "The servers' policy has far more probability outside of its K likeliest ids than the policy "
            "has, and their ratio multiplies the term. Add --rollout-is token with --rollout-is-threshold 2, "
            "which bounds it by 1, raise --rollout-score-centering, or lower --rollout-max-lag.",
            high=2.0,
        ),
    ),
    MetricSpec(
        "loss/centering_train_tail",
        "probability under the policy of ids that are not among the K likeliest of the server",
        "mean over kept tokens of 1 - sum_H p",
        only_with="--rollout-score-centering",
        usual=UsualRange(
            "much of the distribution is outside of the exactly centered ids",
            "There the mismatch is taken for one ratio of all ids. Raise --rollout-score-centering.",
            high=0.2,
        ),
    ),
    MetricSpec(
        "loss/centering_rollout_tail",
        "the same probability under the servers' policy",
        "mean over kept tokens of 1 - sum_H q",
        only_with="--rollout-score-centering",
    ),
    MetricSpec(
        "loss/sampler_kl",
        "distance to the policy that sampled, as the pull to it estimates it",
        "mean over kept tokens of D^2, or of e^D - 1 - D",
        only_with="--rollout-sampler-kl-coef",
        usual=UsualRange(
            "the policy that is trained is far from the one that sampled",
            "The train-infer mismatch remains in it whatever is trained: see KL(k3). Above that: fewer "
            "updates of a batch, a smaller --rollout-max-lag, or a larger --rollout-sampler-kl-coef.",
            high=0.1,
        ),
    ),
)
